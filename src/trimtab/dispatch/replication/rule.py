"""The rule by which slots move to other ranks: every cap that may be, and which of them is taken.

Ranks stand in one order, heaviest first. From its front come donors, which hold more than the cap, and their surplus
lies end to end on a line, each one's experts largest first; from its back come receivers, and their room lies end to
end on the same line. A piece is what lies between two neighboring cuts: one expert, one receiver. No loop, no sort of
pieces, nothing read, integers throughout; so every rank that has the same counts finds the same pieces.

Where some rank would hold more than e replicas, receivers are filled as in Walker's alias table: each whole from the
one donor in whose part of the line its room begins. A donor that gives more than its surplus gets what it then lacks
from the next donor, from the front of that one's experts. So a rank's replicas come from one rank, which has e experts.

Legend: P ranks, E experts, e = E / P local ones, B caps, W = 2 ways (surplus to room, alias table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trimtab.dispatch.options import PARTS

POWERS = 9
"""Tolerances that the rule tries: 1/64, 1/32, ... 2, 4; beside the mean itself, and moving nothing."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Moves under one cap: `slots_n` slots of expert `expert_n` to rank `rank_n`, E + P of them, many empty.

    cap: [] the most slots that a rank computes.
    """

    expert_n: Tensor
    rank_n: Tensor
    slots_n: Tensor
    cap: Tensor


Count = TypeVar("Count", int, Tensor)


def cap_of(mean: Count, tolerance: int) -> Count:
    """The most slots of a rank, so many PARTS of the mean above it."""
    return mean + mean * tolerance // PARTS


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
        cap_B = cap_of(mean[None], tolerance)
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
        expert_n=torch.cat((expert_E, expert_E[which_BP.index_select(0, best)[0]])),
        rank_n=rank_P[to_n],
        slots_n=torch.cat((chosen(slots_WBPe), chosen(slots_WBP))),
        cap=cap_B1.index_select(0, best).view(()),
    )
