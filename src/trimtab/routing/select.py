"""Which experts a token gets: functions of logits and scores alone, without gradients.

Ties go to the lowest expert index (in expert choice: to the first token), always. NaN counts as the largest score.

Legend: T tokens, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.routing.capacity import capacity
from trimtab.routing.operators import top
from trimtab.routing.options import RouterOptions


class Choosing(NamedTuple):
    """All that a selection may look at. real_T: the token mask, None where all are real."""

    logits_TE: Tensor
    scores_TE: Tensor
    bias_E: Tensor | None
    real_T: Tensor | None
    config: RouterOptions
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


def limit_groups(scores_TE: Tensor, config: RouterOptions) -> Tensor:
    """Scores with -inf outside each token's best groups (DeepSeek-V3, arXiv 2412.19437, 2.1.2: node-limited)."""
    tokens, num_experts = scores_TE.shape
    by_group = scores_TE.view(tokens, config.groups, num_experts // config.groups)
    worth = by_group.topk(2, -1).values.sum(-1) if config.group_score == "top2" else by_group.amax(-1)
    shut = torch.ones_like(worth, dtype=torch.bool).scatter_(1, top(worth, config.top_groups), False)
    return by_group.masked_fill(shut[..., None], -math.inf).view(tokens, num_experts)


def _only(real_T: Tensor | None, values_TE: Tensor) -> Tensor:
    """-inf for tokens that are not real."""
    return values_TE if real_T is None else values_TE.masked_fill(~real_T[:, None], -math.inf)


def sinkhorn(logits_TE: Tensor, real_T: Tensor | None, iterations: int) -> Tensor:
    """Log of the doubly normalized exp(logits) over the real tokens [T, E] (Sinkhorn-Knopp; as in BASE, S-BASE and
    Megatron-LM), rows last. A fixed number of iterations: nothing is read back to the host."""
    rows = logits_TE
    for _ in range(iterations):
        columns = rows - _only(real_T, rows).logsumexp(0, keepdim=True)
        rows = columns - columns.logsumexp(1, keepdim=True)
    return rows


def expert_choice(scores_TE: Tensor, real_T: Tensor | None, capacity: int) -> Tensor:
    """Each expert's `capacity` best tokens (Zhou et al., arXiv 2202.09368), as ids [T, E]: e or -1 in column e.

    A token may be picked by any number of experts, so K is E: the one bound that all ranks agree on unasked.
    """
    order = _only(real_T, scores_TE).sort(dim=0, descending=True, stable=True).indices
    first_T1 = torch.arange(order.shape[0], device=order.device)[:, None] < capacity  # no slice of a symbolic length
    chosen = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, order, first_T1.expand_as(order))
    return torch.where(chosen, torch.arange(scores_TE.shape[1], device=scores_TE.device), -1)


def _pick_top(c: Choosing) -> Tensor:
    values = c.scores_TE if c.bias_E is None else c.scores_TE + c.bias_E
    return top(limit_groups(values, c.config) if c.config.groups > 1 else values, c.config.top_k)


def _pick_sinkhorn(c: Choosing) -> Tensor:
    if not c.training:
        return _pick_top(c)
    return top(sinkhorn(c.logits_TE, c.real_T, c.config.sinkhorn_iterations), c.config.top_k)


def _pick_by_experts(c: Choosing) -> Tensor:
    return expert_choice(c.scores_TE, c.real_T, capacity(c.scores_TE.shape[0], c.config))


def _pick_in_turn(c: Choosing) -> Tensor:
    """Slot n goes to expert n % E."""
    shape = c.scores_TE.shape[0], c.config.top_k
    return (torch.arange(shape[0] * shape[1], device=c.scores_TE.device) % c.config.num_experts).view(shape)


SELECTS: dict[str, Select] = {
    "topk": Select(pick=_pick_top, says="each token's best experts"),
    "sinkhorn": Select(pick=_pick_sinkhorn, says="balanced assignment while training, top-k otherwise"),
    "expert_choice": Select(
        pick=_pick_by_experts, says="experts pick tokens (arXiv 2202.09368)", experts_pick=True
    ),
    "balanced": Select(pick=_pick_in_turn, says="round robin, whatever the scores: for benchmarks only"),
}  # fmt: skip
"""`RouterConfig(select=...)`. Another is a row of this table, which programs may add to before they build a router."""


def experts_pick(config: RouterOptions) -> bool:
    """Whether experts pick tokens: a decision has a column for each expert."""
    return SELECTS[config.select].experts_pick


def columns(config: RouterOptions) -> int:
    """How many ids a decision has for each token, without padding."""
    return config.num_experts if experts_pick(config) else config.top_k


def select(
    logits_TE: Tensor,
    scores_TE: Tensor,
    bias_E: Tensor | None,
    real_T: Tensor | None,
    config: RouterOptions,
    training: bool,
) -> Tensor:
    """Expert ids [T, K], int64; -1 for tokens that are not real, where there are such. [T, E] where experts pick.

    logits_TE, scores_TE: detached, no gradient comes back.
    """
    ids = SELECTS[config.select].pick(Choosing(logits_TE, scores_TE, bias_E, real_T, config, training))
    return ids if real_T is None else ids.masked_fill(~real_T[:, None], -1)
