"""Which experts a token gets, and who stays where an expert has room for so many slots: no gradients, no host sync.

Ties go to the lowest expert index (in expert choice: to the first token), always. NaN counts as the largest score.

Legend: T tokens, E experts, K experts per token, G groups of experts, N = T * K slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.operators import operator
from trimtab.routing.scores import count_ids

FEW = 2048
"""Scores up to which one stable sort is faster than K times a maximum over all."""


class Choosing(NamedTuple):
    """All that a selection may look at. real_T: the token mask, None where all are real. config: the `RouterConfig`."""

    logits_TE: Tensor
    scores_TE: Tensor
    bias_E: Tensor | None
    real_T: Tensor | None
    config: Any
    training: bool


@dataclass(frozen=True, kw_only=True)
class Select:
    """A way to select.

    pick: expert ids int64, [T, K] or, where experts pick tokens, [T, E] with e or -1 in column e. Ids of tokens that
        are not real are replaced by -1 afterwards.
    says: one line of help.
    """

    pick: Callable[[Choosing], Tensor]
    says: str
    experts_pick: bool = False


def top(scores_TE: Tensor, k: int) -> Tensor:
    """The k best, best first: [T, k] int64. `torch.topk` leaves the order of ties open."""
    if torch.compiler.is_compiling():  # a graph serves any number of tokens
        picked: Tensor = _TOP(scores_TE, k)
        return picked
    return _top(scores_TE, k)


def _top(scores_TE: Tensor, k: int) -> Tensor:
    if scores_TE.numel() <= FEW or scores_TE.device.type != "cpu":  # there launches cost more than comparisons
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    # Experts first: maxima over rows of tokens are vectors, and three times as fast as argmax or torch.topk.
    lowest = torch.finfo(scores_TE.dtype).min  # what was picked lies below any other
    left_ET = scores_TE.T.clone(memory_format=torch.contiguous_format)
    left_ET.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=lowest)
    best_ET = torch.empty_like(left_ET, dtype=torch.float32)
    first_E1 = torch.arange(left_ET.shape[0], 0, -1, device=left_ET.device, dtype=torch.float32)[:, None]
    picks = []
    for _ in range(k):
        torch.eq(left_ET, left_ET.amax(0, keepdim=True), out=best_ET)
        pick_1T = left_ET.shape[0] - best_ET.mul_(first_E1).amax(0, keepdim=True).long()
        left_ET.scatter_(0, pick_1T, -math.inf)
        picks.append(pick_1T)
    return torch.cat(picks).T.contiguous()


_TOP = operator(
    "top(Tensor scores_TE, int k) -> Tensor",
    _top, lambda scores_TE, k: scores_TE.new_empty(scores_TE.shape[0], k, dtype=torch.int64),
)  # fmt: skip


def limit_groups(scores_TE: Tensor, groups: int, top_groups: int, group_score: str) -> Tensor:
    """Scores with -inf outside each token's best groups (DeepSeek-V3, arXiv 2412.19437, 2.1.2: node-limited)."""
    tokens, num_experts = scores_TE.shape
    by_group = scores_TE.view(tokens, groups, num_experts // groups)
    worth = by_group.topk(2, -1).values.sum(-1) if group_score == "top2" else by_group.amax(-1)
    shut = torch.ones_like(worth, dtype=torch.bool).scatter_(1, top(worth, top_groups), False)
    return by_group.masked_fill(shut[..., None], -math.inf).view(tokens, num_experts)


def _only(real_T: Tensor | None, values_TE: Tensor) -> Tensor:
    """-inf for tokens that are not real."""
    return values_TE if real_T is None else values_TE.masked_fill(~real_T[:, None], -math.inf)


def sinkhorn(logits_TE: Tensor, real_T: Tensor | None, iterations: int) -> Tensor:
    """Log of the doubly normalized exp(logits) over the real tokens [T, E] (Sinkhorn-Knopp; as in BASE, S-BASE and
    Megatron-LM), rows last."""
    rows = logits_TE
    for _ in range(iterations):
        columns = rows - _only(real_T, rows).logsumexp(0, keepdim=True)
        rows = columns - columns.logsumexp(1, keepdim=True)
    return rows


def _pick_top(c: Choosing) -> Tensor:
    values, o = c.scores_TE if c.bias_E is None else c.scores_TE + c.bias_E, c.config
    return top(limit_groups(values, o.groups, o.top_groups, o.group_score) if o.groups > 1 else values, o.top_k)


def _pick_sinkhorn(c: Choosing) -> Tensor:
    if not c.training:
        return _pick_top(c)
    return top(sinkhorn(c.logits_TE, c.real_T, c.config.sinkhorn_iterations), c.config.top_k)


def _pick_by_experts(c: Choosing) -> Tensor:
    """Each expert's best tokens (Zhou et al., arXiv 2202.09368), as ids [T, E]: e or -1 in column e.

    A token may be picked by any number of experts, so K is E: the one bound that all ranks agree on unasked.
    """
    tokens, num_experts = c.scores_TE.shape
    order = _only(c.real_T, c.scores_TE).sort(dim=0, descending=True, stable=True).indices
    first_T1 = torch.arange(tokens, device=order.device)[:, None] < c.config.room(tokens)  # no slice of symbolic length
    chosen = torch.zeros_like(c.scores_TE, dtype=torch.bool).scatter_(0, order, first_T1.expand_as(order))
    return torch.where(chosen, torch.arange(num_experts, device=order.device), -1)


def _pick_in_turn(c: Choosing) -> Tensor:
    """Slot n goes to expert n % E."""
    tokens, num_experts = c.scores_TE.shape
    slots = torch.arange(tokens * c.config.top_k, device=c.scores_TE.device)
    return (slots % num_experts).view(tokens, c.config.top_k)


SELECTS: dict[str, Select] = {
    "topk": Select(pick=_pick_top, says="each token's best experts"),
    "sinkhorn": Select(pick=_pick_sinkhorn, says="even assignment while training, top-k otherwise"),
    "expert_choice": Select(
        pick=_pick_by_experts, says="experts pick tokens (arXiv 2202.09368)", experts_pick=True
    ),
    "balanced": Select(pick=_pick_in_turn, says="round robin, whatever the scores: for benchmarks only"),
}  # fmt: skip
"""`RouterConfig(select=...)`. Another is a row of this table, which programs may add to before they build a router."""


def select(chosen_by: Choosing) -> Tensor:
    """Expert ids [T, K], int64; -1 for tokens that are not real, where there are such. [T, E] where experts pick."""
    real_T = chosen_by.real_T
    ids: Tensor = SELECTS[chosen_by.config.select].pick(chosen_by)
    return ids if real_T is None else ids.masked_fill(~real_T[:, None], -1)


def most_slots(ids_TK: Tensor, num_experts: int, room: int) -> int:
    """How many slots all experts together take at most, each of which takes `room`. Symbolic in a traced graph."""
    return torch.sym_min(num_experts * room, ids_TK.numel())  # type: ignore[no-untyped-call, no-any-return]


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
