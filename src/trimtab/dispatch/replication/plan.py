"""Replicated experts: the plan of one call. Hot experts are copied to ranks with room, so that no rank computes more
than a cap. Made on every rank from the same counts, in tensors on their device, without a value read.

    plan  = replica_plan(counts, config)               slots of each expert on each rank, and replicas
    cells = slot_shares(plan, counts, etp_rank, rank)    of this rank's own slots, how many go where
    ids   = physical_ids(ids, cells, plan)             logical experts -> places

A rank has 2e places: its own experts at 0 .. e - 1, replicas behind them, by expert. Place l of rank r has the physical
id r * 2e + l. Only the dispatcher knows of places; routers, losses, loads, records and errors see logical experts.

Legend: P ranks, E experts, e = E / P local ones, H ranks that split each expert's F, T tokens, K experts per token,
N = T * K slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replication.rule import pieces_of
from trimtab.kernels.rows import narrow


@dataclass(kw_only=True)
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
    replica_bytes: int = 0

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
        slots_EP=slots_EP,
        place_EP=place_EP,
        replicas_PP=is_replica_EP.view(ranks, e, ranks).sum(1),
        cap=pieces.cap,
        checksum=_checksum(counts_HPE.flatten(0, 1)) + 3 * _checksum(slots_EP) + 5 * pieces.cap,
    )


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
