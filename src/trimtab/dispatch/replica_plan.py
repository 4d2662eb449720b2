"""Replicated experts: the plan of one call. Hot experts are copied to ranks with room, so that no rank computes more
than a cap. Made on every rank from the same counts, in tensors on their device, without a value read.

    plan  = replica_plan(counts, config)               slots of each expert on each rank, and replicas
    cells = slot_shares(plan, counts, etp_rank, rank)    of this rank's own slots, how many go where
    ids   = physical_ids(ids, cells, plan)             logical experts -> places

A rank has 2e places: its own experts at 0 .. e - 1, replicas behind them, by expert. Place l of rank r has the physical
id r * 2e + l. Only the dispatcher knows of places; routers, losses, loads, records and errors see logical experts.

The rule by which slots move. Ranks stand in one order, heaviest first. From its front come donors, which hold more than
the cap, and their surplus lies end to end on a line, each one's experts largest first; from its back come receivers,
and their room lies end to end on the same line. A piece is what lies between two neighboring cuts: one expert, one
receiver. No loop, no sort of pieces, integers throughout; so ranks that have the same counts find the same pieces.

Where some rank would hold more than e replicas, receivers are filled as in Walker's alias table: each whole from the
one donor in whose part of the line its room begins. A donor that gives more than its surplus gets what it then lacks
from the next donor, from the front of that one's experts. So a rank's replicas come from one rank, which has e experts.

Legend: P ranks, E experts, e = E / P local ones, H ranks that split each expert's F, T tokens, K experts per token,
N = T * K slots, B caps, W = 2 ways (surplus to room, alias table).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimtab.dispatch.options import PARTS, ReplicationConfig
from trimtab.kernels.rows import narrow

POWERS = 9
"""Tolerances that the rule tries: 1/64, 1/32, ... 2, 4; beside the mean itself, and moving nothing."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Moves under one cap: `slots_n` slots of expert `expert_n` to rank `rank_n`, E + P of them, many empty. cap: []
    the most slots that a rank computes."""

    expert_n: Tensor
    rank_n: Tensor
    slots_n: Tensor
    cap: Tensor


def pieces_of(loads_E: Tensor, ranks: int, tolerance: int | None, copy_cost: int) -> Pieces:
    """Move slots so that no rank computes more than a cap, with at most E / P replicas on a rank.

    loads_E: [E] int64 slots of each expert.
    tolerance: how far the cap is above the mean, in PARTS of it; None takes the cap with the least
        (most slots of a rank) + copy_cost * (most replicas into or out of a rank), of equal ones the loosest.
    """
    load_Pe = loads_E.view(ranks, -1)
    e, device = load_Pe.shape[1], loads_E.device
    load_P, rank_P = torch.sort(load_Pe.sum(1), descending=True, stable=True)
    size_Pe, local_Pe = torch.sort(load_Pe.index_select(0, rank_P), descending=True, stable=True)
    expert_E = (local_Pe + rank_P[:, None] * e).view(-1)
    end_Pe = size_Pe.cumsum(1)
    start_Pe = end_Pe - size_Pe

    mean = (load_P.sum() + ranks - 1).div(ranks, rounding_mode="floor")
    if tolerance is None:  # made of shifts: a list of numbers would be copied to a device
        above = (mean << torch.arange(POWERS, device=device)) >> 6
        cap_B = torch.cat((mean[None], mean + above, load_P[:1]))
    else:
        cap_B = mean[None] + mean[None] * tolerance // PARTS
    cap_B1 = torch.minimum(cap_B, load_P[:1])[:, None]

    surplus_BP = (load_P - cap_B1).clamp(min=0)
    room_BP = (cap_B1 - load_P).clamp(min=0).flip(1)  # receivers in their order
    surplus_end_BP = surplus_BP.cumsum(1)
    surplus_start_BP, total_B1 = surplus_end_BP - surplus_BP, surplus_end_BP[:, -1:]
    room_end_BP = room_BP.cumsum(1)
    room_start_BP, room_end_BP = (torch.minimum(t, total_B1) for t in (room_end_BP - room_BP, room_end_BP))
    # What a donor lacks in the alias table: the rest of the receiver in which its surplus ends.
    last_BP = torch.searchsorted(room_end_BP, surplus_end_BP)
    lack_BP = room_end_BP.gather(1, last_BP) - surplus_end_BP
    lack_WBP = torch.stack((torch.zeros_like(lack_BP), lack_BP))
    given_WBP = surplus_BP + lack_WBP
    back_WBP = lack_WBP.roll(1, -1)  # to the donor before; the last one lacks nothing

    # Pieces that begin where an expert begins.
    at_BPe = surplus_start_BP[:, :, None] + start_Pe
    room_BPe = torch.searchsorted(room_end_BP, at_BPe.flatten(1), right=True).clamp(max=ranks - 1).view_as(at_BPe)
    room_end_BPe = room_end_BP.gather(1, room_BPe.flatten(1)).view_as(at_BPe) - surplus_start_BP[:, :, None]
    is_back_WBPe = start_Pe < back_WBP[..., None]
    order_P = torch.arange(ranks, device=device)
    to_WBPe = torch.where(is_back_WBPe, order_P[:, None] - 1, ranks - 1 - room_BPe)
    until_WBPe = torch.where(is_back_WBPe, back_WBP[..., None], room_end_BPe)
    until_WBPe = torch.minimum(torch.minimum(until_WBPe, end_Pe), given_WBP[..., None])
    slots_WBPe = (until_WBPe - start_Pe).clamp(min=0)

    # Pieces that begin where a receiver begins, unless an expert does too.
    donor_BP = torch.searchsorted(surplus_end_BP, room_start_BP, right=True).clamp(max=ranks - 1)
    donor_start_BP = surplus_start_BP.gather(1, donor_BP)
    before_P = load_P.cumsum(0) - load_P
    shift_BP = before_P[donor_BP] - donor_start_BP  # to the line of all that donors hold
    end_E = (before_P[:, None] + end_Pe).view(-1)
    at_BP = room_start_BP + shift_BP
    which_BP = torch.searchsorted(end_E, at_BP, right=True).clamp(max=loads_E.shape[0] - 1)
    stop_BP = torch.minimum(room_end_BP, end_E[which_BP] - shift_BP)
    given_end_WBP = (surplus_start_BP + given_WBP).gather(2, donor_BP.expand_as(given_WBP))
    slots_WBP = (torch.minimum(stop_BP, given_end_WBP) - room_start_BP).clamp(min=0)
    slots_WBP = slots_WBP.where(at_BP != (end_E - size_Pe.view(-1))[which_BP], 0)

    # Most replicas into and out of a rank.
    moves_WBPe, moves_WBP = (slots_WBPe > 0).long(), (slots_WBP > 0).long()
    into_WBP = moves_WBP.flip(2).scatter_add(2, to_WBPe.flatten(2).clamp(min=0), moves_WBPe.flatten(2))
    out_WBP = moves_WBPe.sum(3).scatter_add(2, donor_BP.expand_as(moves_WBP), moves_WBP)
    most_WB = into_WBP.amax(2)
    alias_B = most_WB[0] > e
    copies_WB = torch.maximum(most_WB, out_WBP.amax(2))
    copies_B = torch.where(alias_B, copies_WB[1], copies_WB[0])

    cost_B = cap_B1[:, 0] + copy_cost * copies_B
    order_B = torch.arange(cap_B.shape[0], device=device)
    best = torch.where(cost_B == cost_B.amin(), order_B, 0).amax().view(1)
    pick = best + alias_B[best] * cap_B.shape[0]

    def chosen(t: Tensor) -> Tensor:
        return t.flatten(0, 1).index_select(0, pick).view(-1)

    to_n = torch.cat((chosen(to_WBPe), ranks - 1 - order_P))
    return Pieces(
        expert_n=torch.cat((expert_E, expert_E[which_BP.index_select(0, best)[0]])), rank_n=rank_P[to_n],
        slots_n=torch.cat((chosen(slots_WBPe), chosen(slots_WBP))), cap=cap_B1.index_select(0, best).view(()),
    )  # fmt: skip


@dataclass
class ReplicaPlan:
    """One call's plan, int64 on the device of the counts, equal on every rank. Reading a tensor is a host sync.

    slots_EP: [E, P] slots of each expert that each rank computes.
    place_EP: [E, P] the expert's place on each rank, below e at home, from e on for a replica; -1 where it is not.
    replicas_PP: [P, P] replicas that rank s sends to rank d.
    cap: [] the most slots that a rank may compute.
    checksum: [] of the counts and of what the plan says.
    replica_bytes: of one replica, 0 before the first has been sent.
    """

    slots_EP: Tensor
    place_EP: Tensor
    replicas_PP: Tensor
    cap: Tensor
    checksum: Tensor
    replica_bytes: int = field(default=0, kw_only=True)

    @property
    def loads_before_P(self) -> Tensor:
        """[P] slots of each rank's own experts."""
        return self.slots_EP.sum(1).view(self.slots_EP.shape[1], -1).sum(1)

    @property
    def loads_after_P(self) -> Tensor:
        """[P] slots that each rank computes."""
        return self.slots_EP.sum(0)

    @property
    def replicas_P(self) -> Tensor:
        """[P] replicas on each rank, at most e."""
        return self.replicas_PP.sum(0)


def replica_plan(counts_HPE: Tensor, config: ReplicationConfig) -> ReplicaPlan:
    """The plan for these counts: [H, P, E] int64 kept slots of each rank for each expert, H = 1 without expert TP."""
    _, ranks, experts = counts_HPE.shape
    e, device = experts // ranks, counts_HPE.device
    loads_E = counts_HPE.sum((0, 1))
    pieces = pieces_of(loads_E, ranks, config.parts, config.copy_cost)
    slots_EP = torch.zeros(experts * ranks, dtype=torch.int64, device=device)
    slots_EP = slots_EP.scatter_add_(0, pieces.expert_n * ranks + pieces.rank_n, pieces.slots_n).view(experts, ranks)
    is_replica_EP = slots_EP > 0
    home_view(slots_EP).copy_((loads_E - slots_EP.sum(1)).view(ranks, e))
    place_EP = torch.where(is_replica_EP, is_replica_EP.cumsum(0) + (e - 1), -1)
    home_view(place_EP).copy_(torch.arange(e, device=device))
    return ReplicaPlan(
        slots_EP=slots_EP, place_EP=place_EP, replicas_PP=is_replica_EP.view(ranks, e, ranks).sum(1), cap=pieces.cap,
        checksum=_checksum(counts_HPE.flatten(0, 1)) + 3 * _checksum(slots_EP) + 5 * pieces.cap,
    )  # fmt: skip


def slot_shares(plan: ReplicaPlan, counts_HPE: Tensor, etp_rank: int, rank: int) -> Tensor:
    """[E, P] how many of this rank's own slots of each expert each rank computes; rows sum to counts[etp_rank, rank].

    A rank keeps what it computes itself. The rest of an expert lies on a line, sources end to end in the order of
    (etp_rank, rank), and so do the ranks that compute it; a cell is what two of them share.
    """
    before_HPE = counts_HPE.cumsum(0) - counts_HPE
    kept_HPE = torch.minimum(counts_HPE, (plan.slots_EP.T - before_HPE).clamp(min=0))
    sent_nE = (counts_HPE - kept_HPE).flatten(0, 1)
    me = etp_rank * counts_HPE.shape[1] + rank
    start_E1 = sent_nE[:me].sum(0)[:, None]
    taken_EP = plan.slots_EP - kept_HPE.sum(0).T
    end_EP = taken_EP.cumsum(1)
    overlap_end_EP = torch.minimum(end_EP, start_E1 + sent_nE[me][:, None])
    cells_EP = (overlap_end_EP - torch.maximum(end_EP - taken_EP, start_E1)).clamp(min=0)
    cells_EP[:, rank] += kept_HPE[etp_rank, rank]
    return cells_EP


def physical_ids(ids_TK: Tensor, cells_EP: Tensor, plan: ReplicaPlan) -> Tensor:
    """Logical ids -> physical ones of 2 * E places, [T, K] in the dtype of `ids_TK`; what is no expert becomes -1.

    The slots of an expert go to its ranks in their order, so that which slot goes where is decided without peers.
    The ids must be those that `cells_EP` counts.
    """
    experts, ranks = cells_EP.shape
    ids_N = ids_TK.reshape(-1)
    key_N = torch.where((ids_N >= 0) & (ids_N < experts), ids_N, experts)
    order_N = torch.sort(narrow(key_N, experts), stable=True).indices
    places = 2 * experts // ranks
    physical_EP = plan.place_EP + torch.arange(0, ranks * places, places, device=ids_N.device)
    dropped = ids_N.shape[0] - cells_EP.sum()
    value_n = torch.cat((physical_EP.reshape(-1), physical_EP.new_full((1,), -1)))
    count_n = torch.cat((cells_EP.reshape(-1), dropped[None]))
    sorted_N = value_n.repeat_interleave(count_n, output_size=ids_N.shape[0]).to(ids_N.dtype)
    return torch.empty_like(ids_N).scatter_(0, order_N, sorted_N).view_as(ids_TK)


def home_view(t_EP: Tensor) -> Tensor:
    """[P, e] view of an [E, P] tensor: what stands there for each rank's own experts."""
    experts, ranks = t_EP.shape
    return t_EP.view(ranks, experts // ranks, ranks).diagonal(dim1=0, dim2=2).T


def _checksum(t_mn: Tensor) -> Tensor:
    """[] of an integer matrix, wrapping: each row and each column has an odd factor of its own."""
    rows, columns = (_factors(n, t_mn.device) for n in t_mn.shape)
    return ((t_mn * columns).sum(1) * rows).sum()


def _factors(n: int, device: torch.device) -> Tensor:
    key_n = torch.arange(1, n + 1, device=device) * 0x2545F4914F6CDD1D
    key_n = (key_n ^ (key_n >> 29)) * 0x369DEA0F31A53F85
    return (key_n ^ (key_n >> 32)) | 1
