"""Which experts a token gets: functions of scores alone, without gradients.

Ties go to the lowest expert index (in expert choice: to the first token), always. NaN counts as the largest score.

Legend: T tokens, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimtab.routing.capacity import least
from trimtab.routing.config import RouterConfig

FEW = 2048
"""Scores up to which one stable sort takes less time than K times argmax: on one thread 7 us in place of 37 for a token
of 8 of 128 experts."""


def top(scores_TE: Tensor, k: int) -> Tensor:
    """The k best, best first: [T, k] int64. `torch.topk` leaves the order of ties open; argmax takes the first, and a
    stable sort leaves it in front."""
    if not torch.compiler.is_compiling() and scores_TE.numel() <= FEW:  # a graph serves any number of tokens
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    left = scores_TE.clamp(min=torch.finfo(scores_TE.dtype).min)  # what was picked lies below any other
    picks = []
    for _ in range(k):
        pick = left.argmax(-1, keepdim=True)
        left.scatter_(1, pick, -math.inf)
        picks.append(pick)
    return torch.cat(picks, dim=1)


def limit_groups(scores_TE: Tensor, config: RouterConfig) -> Tensor:
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
    """Log of the doubly normalised exp(logits) over the real tokens [T, E] (Sinkhorn-Knopp; as in BASE, S-BASE and
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
    chosen = torch.zeros_like(scores_TE, dtype=torch.bool)
    if torch.compiler.is_exporting():  # a slice of a symbolic length would be for one alone, or for any but one
        first_T = torch.arange(order.shape[0], device=order.device) < capacity
        chosen.scatter_(0, order, first_T[:, None].expand_as(order))
    else:
        chosen.scatter_(0, order[:capacity], True)
    return torch.where(chosen, torch.arange(scores_TE.shape[1], device=scores_TE.device), -1)


def balanced(tokens: int, config: RouterConfig, device: torch.device) -> Tensor:
    """Round robin [T, K]: slot n goes to expert n % E."""
    slots = torch.arange(tokens * config.top_k, device=device)
    return (slots % config.num_experts).view(tokens, config.top_k)


@torch.no_grad()
def select(
    logits_TE: Tensor,
    scores_TE: Tensor,
    bias_E: Tensor | None,
    real_T: Tensor | None,
    config: RouterConfig,
    training: bool,
) -> Tensor:
    """Expert ids [T, K], int64; -1 for tokens that are not real, where there are such. [T, E] with expert choice."""
    tokens = scores_TE.shape[0]
    if config.select == "balanced":
        ids = balanced(tokens, config, scores_TE.device)
    elif config.select == "expert_choice":
        ids = expert_choice(scores_TE, real_T, capacity(tokens, config))
    elif config.select == "sinkhorn" and training:
        ids = top(sinkhorn(logits_TE, real_T, config.sinkhorn_iterations), config.top_k)
    else:
        choice = scores_TE if bias_E is None else scores_TE + bias_E
        ids = top(limit_groups(choice, config) if config.groups > 1 else choice, config.top_k)
    return ids if real_T is None else ids.masked_fill(~real_T[:, None], -1)


def capacity(tokens: int, config: RouterConfig) -> int:
    """Slots that one expert takes from this rank's `tokens`: ceil(factor * K * T / E)."""
    factor = 1.0 if config.capacity_factor is None else config.capacity_factor
    if torch.compiler.is_compiling():
        from trimtab.routing.compiled import constant

        factor = constant(factor.hex())  # sizes of a graph may depend on no symbol but the number of tokens
    slots = factor * config.top_k * tokens / config.num_experts
    if torch.compiler.is_exporting():  # a program with `math.ceil` of a symbol cannot be saved
        whole = math.trunc(slots)
        part = math.trunc((slots - whole) * 2.0**52)  # 0 for none alone: behind 1 and more there is none below 2^-52
        return whole + least(part, 1)
    return math.ceil(slots)
