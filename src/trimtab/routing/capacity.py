"""Capacity: an expert takes so many slots of a rank and no more; with padding, exactly so many.

Both keep their shapes whatever the routing, make nothing of size T x E and read nothing back to the host.

Legend: T tokens, E experts, K experts per token, N = T * K slots, X columns of padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimtab.routing.options import RouterOptions
from trimtab.routing.scores import count_ids


def capacity(tokens: int, config: RouterOptions) -> int:
    """Slots that one expert takes from this rank's `tokens`: ceil(factor * K * T / E)."""
    slots = config.factor * config.top_k * tokens / config.num_experts
    whole = math.trunc(slots)  # not `math.ceil`: an exported program that holds one cannot be saved
    part = math.trunc((slots - whole) * 2.0**52)  # above 1 there is no fraction below 2^-52
    return whole + least(part, 1)


def least(a: int, b: int) -> int:
    """`min`, of symbols too."""
    smaller: int = torch.sym_min(a, b)  # type: ignore[no-untyped-call]
    return smaller


def most_slots(ids_TK: Tensor, config: RouterOptions, room: int) -> int:
    """How many slots all experts together take at most, each of which takes `room`. Symbolic in a traced graph."""
    return least(config.num_experts * room, ids_TK.numel())


@torch.no_grad()
def drop_over(ids_TK: Tensor, weights_TK: Tensor, num_experts: int, room: int, by: str) -> Tensor:
    """Ids with -1 in the slots for which their expert, which takes `room`, has no room.

    by: "probability" keeps the largest weights, ties in the order of slots; "position" the first slots.
    """
    ids_N = ids_TK.reshape(-1)
    key_N = torch.where(ids_N < 0, num_experts, ids_N)
    if by == "probability":
        order_N = weights_TK.reshape(-1).argsort(descending=True, stable=True)
        order_N = order_N[key_N[order_N].argsort(stable=True)]
    else:
        order_N = key_N.argsort(stable=True)
    counts_E = count_ids(ids_N, num_experts)
    start_E = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0))
    sorted_N = key_N[order_N]
    over_N = torch.arange(ids_N.shape[0], device=ids_N.device) - start_E[sorted_N] >= room
    return ids_N.scatter(0, order_N, sorted_N.masked_fill(over_N | (sorted_N == num_experts), -1)).view_as(ids_TK)


@torch.no_grad()
def padding(ids_TK: Tensor, config: RouterOptions, room: int) -> Tensor:
    """Further slots [T, X] that fill every expert up to `room`, -1 behind the last; theirs is the weight 0.

    X is the same on every rank, whatever its T.
    With T >= E they always suffice: E * ceil(f K T / E) <= T (f K + 1).
    """
    shape = (ids_TK.shape[0], math.ceil(config.factor * config.top_k) + 1)
    missing_E = (room - count_ids(ids_TK, config.num_experts)).clamp(min=0)
    slots = torch.arange(shape[0] * shape[1], device=ids_TK.device)
    ids = torch.searchsorted(missing_E.cumsum(0), slots, right=True)
    return ids.masked_fill(ids == config.num_experts, -1).view(shape)
