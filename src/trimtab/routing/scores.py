"""Logits, scores and weights of a router, in float32 at least: `scores = SCORES[name].of(x W^T)`. So are their
gradients, unless the user lets CUDA round to TF32: that holds for both products of the logits' backward.

Legend: T tokens, D model dim, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import autocast_at_work, forward_of, needed, once_differentiable
from trimtab.kernels.tensor_checks import static_by_default

_LOWEST = -80.0
"""Below it softplus underflows in float32 and its root has no finite slope; the true slope is below 1e-17."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A way from logits to scores.

    of: logits [T, E] to scores [T, E] >= 0 in the same dtype, differentiable; NaN for a token with a logit of NaN.
    distribution: a token's scores sum to 1. to_one: each is 1 at most.
    of_picked: normalized weights are the scores of the picked logits alone.
    says: one line of help.
    """

    of: Callable[[Tensor], Tensor]
    says: str
    distribution: bool = False
    to_one: bool = False
    of_picked: bool = False


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _sqrt_softplus(logits: Tensor) -> Tensor:
    return F.softplus(logits.clamp(min=_LOWEST), threshold=50).sqrt()


SCORES: dict[str, Score] = {
    "softmax": Score(of=_softmax, says="softmax over all experts", distribution=True, to_one=True, of_picked=True),
    "sigmoid": Score(of=torch.sigmoid, to_one=True, says="sigmoid of each logit"),
    "sqrtsoftplus": Score(of=_sqrt_softplus, says="sqrt(softplus) of each logit"),
}
"""`RouterConfig(score=...)`. Another is a row of this table, which programs may add to before they build a router."""


def _upper(t: Tensor) -> Tensor:
    """float32 truncated to bfloat16: a view of the upper halves."""
    return t.view(torch.bfloat16).view(*t.shape, 2).select(-1, 1)


def _parts(t: Tensor) -> Tensor:
    """[p, ...] bfloat16, whose sum over p is `t` exactly; of infinity the first part is infinity, the others NaN."""
    if t.dtype == torch.bfloat16:
        return t.unsqueeze(0)
    whole = t.float().contiguous()
    left = whole - _upper(whole)
    return torch.stack((_upper(whole), _upper(left), _upper(left - _upper(left))))


def exact_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x W^T in float32 on CUDA, whatever TF32 is set to: products of bfloat16 are exact, and summed in float32."""
    x_pTD, weight_qED = _parts(x_TD), _parts(weight_ED)
    y = torch.mm(x_pTD.flatten(0, 1), weight_qED.flatten(0, 1).T, out_dtype=torch.float32)
    if len(x_pTD) == len(weight_qED) == 1:
        return y
    y_pTqE = y.view(*x_pTD.shape[:2], *weight_qED.shape[:2])
    y = y_pTqE.nansum((0, 2))  # infinity times the other parts may be NaN; the clamp keeps NaN of the first parts
    return y_pTqE.select(2, 0).select(0, 0).clamp(y, y)


class _Logits(Function):
    """x W^T in `dtype`; x is saved as it came, not its copy in `dtype`. Autocast is kept out within: what is made of a
    region around this by torch.export(strict=True) cannot be loaded."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.dtype = dtype
        without = x_TD.is_meta or not (autocast_at_work() or static_by_default(x_TD))  # a graph may meet it later
        with nullcontext() if without else torch.autocast(x_TD.device.type, enabled=False):
            if x_TD.is_cuda and dtype == torch.float32 and torch.version.hip is None:
                return exact_product(x_TD, weight_ED)
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
    return forward_of(_Logits, x_TD, weight_ED, dtype)  # type: ignore[no-any-return]


def pick_weights(
    logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, score: Score, *, normalize: bool = False, scale: float = 1.0,
    complete: bool = False,
) -> Tensor:  # fmt: skip
    """Weights [T, K] of the experts picked; 0 where the id is negative. Not `normalize`d they are scale * score, else
    scale * score / sum of the scores picked; of a softmax that is a softmax over the picked logits: no underflow.

    complete: all ids name an expert; else those that do not read some score, and the dispatcher refuses them."""
    index = ids_TK if complete else ids_TK.clamp(0, scores_TE.shape[1] - 1)

    def filled(t_TK: Tensor, value: float) -> Tensor:
        return t_TK if complete else t_TK.masked_fill(ids_TK < 0, value)

    if normalize and score.of_picked:
        picked = logits_TE.gather(1, index)
        weights = filled(score.of(filled(picked, torch.finfo(picked.dtype).min)), 0)
    else:
        weights = filled(scores_TE.gather(1, index), 0)
        if normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if scale == 1 else weights * scale


def count_ids(ids: Tensor, num_experts: int, *, complete: bool = False) -> Tensor:
    """How often each expert is named: [E] int64. Ids that name none are not counted. No host sync.

    complete: every id is known to name an expert.
    """
    flat = ids.flatten() if complete else ids.flatten().clamp(-1, num_experts) + 1
    counts = torch.zeros(num_experts + (0 if complete else 2), dtype=torch.int64, device=ids.device)
    if ids.is_cuda:  # a launch less; twice as slow on the CPU
        counts.scatter_(0, flat, 1, reduce="add")
    else:
        counts.scatter_add_(0, flat, torch.ones_like(flat))
    return counts if complete else counts[1:-1]
