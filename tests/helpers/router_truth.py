"""Routing in plain float64 Python, one token at a time: the truth for weights, picks and losses.

Legend: T tokens, D model dim, E experts, K experts per token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimtab.routing.config import RouterConfig


def truth_scores(logits: Tensor, kind: str) -> Tensor:
    if kind == "softmax":
        shifted = (logits - logits.amax(-1, keepdim=True)).exp()
        return shifted / shifted.sum(-1, keepdim=True)
    sigmoid = 1 / (1 + (-logits).exp())
    return sigmoid if kind == "sigmoid" else torch.log1p(logits.exp()).sqrt()


def truth_weights(logits: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    """[T, K], differentiable in the logits; 0 where the id is negative."""
    scores = truth_scores(logits, config.score)
    rows = []
    for t in range(ids.shape[0]):
        row = [scores[t, int(e)] if e >= 0 else scores.new_zeros(()) for e in ids[t]]
        total = sum(w for w, e in zip(row, ids[t], strict=True) if e >= 0)
        rows.append(torch.stack([config.scale * (w / total if config.normalize and w else w) for w in row]))
    return torch.stack(rows) if rows else logits.new_zeros(ids.shape)


def truth_top(scores: list[float], k: int) -> list[int]:
    """The k best, ties to the lowest index."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


def truth_group_top(scores: list[float], config: RouterConfig) -> list[int]:
    size = config.num_experts // config.groups
    runs = [scores[g * size : (g + 1) * size] for g in range(config.groups)]
    worth = [sum(sorted(run)[-2:]) if config.group_score == "top2" else max(run) for run in runs]
    open_groups = truth_top(worth, config.top_groups)
    masked = [s if e // size in open_groups else -math.inf for e, s in enumerate(scores)]
    return truth_top(masked, config.top_k)


def truth_losses(
    logits: Tensor, ids: Tensor, mask: Tensor, batch: int, config: RouterConfig, fractions: list[float] | None = None
) -> dict[str, Tensor]:
    """All four losses of one process, without coefficients. fractions: of the step, for global_aux."""
    experts, length = config.num_experts, logits.shape[0] // max(batch, 1)
    scores = truth_scores(logits, config.score)
    p = scores / scores.sum(-1, keepdim=True)
    real = [t for t in range(logits.shape[0]) if mask[t]]
    zero = logits.sum() * 0
    count = max(len(real), 1)

    def f(tokens: list[int]) -> list[float]:
        picks = [int(e) for t in tokens for e in ids[t] if e >= 0]
        return [picks.count(e) / max(len(picks), 1) for e in range(experts)]

    def aux(tokens: list[int], share: list[float]) -> Tensor:
        return sum((experts * share[e] * p[t, e] for t in tokens for e in range(experts)), zero) / count

    by_sequence = [[t for t in real if t // length == b] for b in range(batch)] if length else []
    return {
        "aux": aux(real, f(real)),
        "sequence_aux": sum((aux(tokens, f(tokens)) for tokens in by_sequence), zero),
        "global_aux": aux(real, f(real) if fractions is None else fractions),
        "z": sum((logits[t].exp().sum().log() ** 2 for t in real), zero) / count,
    }
