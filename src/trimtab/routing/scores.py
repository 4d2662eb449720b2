"""Logits, scores and weights of a router, in float32 at least, their gradients too.

    logits = x W^T
    scores = softmax(logits)  |  sigmoid(logits)  |  sqrt(softplus(logits))
    weight of a pick = scale * score                                     not normalised
                       scale * score / sum of the scores picked          normalised

Normalised softmax scores are a softmax over the picked logits, and computed so: nothing underflows.

Legend: T tokens, D model dim, E experts, K experts per token.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import forward_of, needed, once_differentiable
from trimtab.routing.config import RouterConfig, Score

_LOWEST = -80.0
"""Below it softplus underflows in float32 and its root has no finite slope; the true slope is below 1e-17."""


class _Logits(Function):
    """x W^T in `dtype`; x is saved as it came, not its copy in `dtype`. Autocast is kept out within: what is made of a
    region around this by torch.export(strict=True) cannot be loaded."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.dtype = dtype
        with nullcontext() if x_TD.is_meta else torch.autocast(x_TD.device.type, enabled=False):  # meta has none
            return x_TD.to(dtype) @ weight_ED.to(dtype).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, _ = needed(ctx)
        dx = (d_TE @ weight.to(ctx.dtype)).to(x.dtype) if need_x else None
        dw = (d_TE.T @ x.to(ctx.dtype)).to(weight.dtype) if need_weight else None
        return dx, dw, None


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """[T, E] in float32, under autocast too; in float64 for float64 tokens."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    logits: Tensor = forward_of(_Logits, x_TD, weight_ED, dtype)
    return logits


def score(logits_TE: Tensor, kind: Score) -> Tensor:
    """Scores of all experts, in the logits' dtype."""
    if kind == "softmax":
        return logits_TE.softmax(-1)
    if kind == "sigmoid":
        return logits_TE.sigmoid()
    return F.softplus(logits_TE.clamp(min=_LOWEST), threshold=50).sqrt()


def probabilities(scores_TE: Tensor, kind: Score) -> Tensor:
    """Scores as a distribution over experts, for the balance losses."""
    return scores_TE if kind == "softmax" else scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)


def pick_weights(
    logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, config: RouterConfig, *, whole: bool = False
) -> Tensor:
    """Weights [T, K] of the experts picked; 0 where the id is negative.

    Ids that name no expert read some score of their token: the dispatcher refuses them. whole: all name one.
    """
    if whole:
        index, none = ids_TK, None
    else:
        index, none = ids_TK.clamp(0, scores_TE.shape[1] - 1), ids_TK < 0

    def filled(t_TK: Tensor, value: float) -> Tensor:
        return t_TK if none is None else t_TK.masked_fill(none, value)

    if config.normalize and config.score == "softmax":
        picked = logits_TE.gather(1, index)
        weights = filled(filled(picked, torch.finfo(picked.dtype).min).softmax(-1), 0)
    else:
        weights = filled(scores_TE.gather(1, index), 0)
        if config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if config.scale == 1 else weights * config.scale


def count_ids(ids: Tensor, num_experts: int) -> Tensor:
    """How often each expert is named: [E] int64. Ids that name none are not counted. No host sync."""
    flat = ids.reshape(-1).clamp(-1, num_experts) + 1
    counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, flat, torch.ones_like(flat))[1:-1]
