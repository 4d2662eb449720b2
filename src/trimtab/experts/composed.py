"""Experts with a function of one's own between their products, or a norm behind them, under ordinary autograd:

    gather -> grouped product -> function -> grouped product -> norm -> weighted sum

Every parameter that a function uses gets its gradient by autograd itself; what autograd saves for it is kept.

Legend: M rows, K slots per row, R expert rows, D model dim, I width of the pre-activations, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import forward_of, once_differentiable
from trimtab.experts.expert_call import ExpertWeights, joined
from trimtab.experts.grouped_linear import grouped_linear
from trimtab.experts.ops import activate_backward_op, activate_op
from trimtab.experts.plan import ExpertPlan, slot_weights
from trimtab.kernels.api import Backend
from trimtab.kernels.rows import combine_rows, gather_padded


def composed_experts(
    x_MD: Tensor, w_MK: Tensor, plan: ExpertPlan, weights: ExpertWeights, activation: str | Callable[[Tensor], Tensor],
    norm: Callable[[Tensor], Tensor] | None, kernels: Backend | str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """As `expert_mlp`. The functions run under the autocast of the caller, on all expert rows at once."""
    up, down = joined(weights.up).to(dtype), weights.down.to(dtype)
    up_bias, down_bias = (None if b is None else b.flatten(1).to(dtype) for b in (weights.up_bias, weights.down_bias))
    options: dict[str, Any] = {"transposed": weights.transposed, "kernels": kernels}
    x_RD: Tensor = forward_of(_Gather, x_MD.to(dtype), plan)
    pre_RI = grouped_linear(x_RD, up, plan.offsets_e, up_bias, **options)
    h_RF = activation(pre_RI) if callable(activation) else apply(pre_RI, activation)
    out_RD = grouped_linear(h_RF.to(dtype), down, plan.offsets_e, down_bias, **options)
    if norm is not None:
        out_RD = norm(out_RD)
    w_R1 = slot_weights(w_MK.to(torch.promote_types(w_MK.dtype, torch.float32)), plan)
    y: Tensor = forward_of(_Combine, out_RD * w_R1, plan)
    return y.to(x_MD.dtype)


def apply(pre: Tensor, word: str) -> Tensor:
    """An activation by name, differentiable, with the pre-activations alone saved: [..., I] -> [..., F]."""
    h: Tensor = forward_of(_Activate, pre, word)
    return h


class _Activate(Function):
    @staticmethod
    def forward(ctx: Any, pre: Tensor, word: str) -> Tensor:
        ctx.save_for_backward(pre)
        ctx.word = word
        h: Tensor = activate_op(pre, word)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        (pre,) = ctx.saved_tensors
        return activate_backward_op(pre, dh, ctx.word), None


class _Gather(Function):
    """Rows [M, D] -> expert rows [R, D], zeros in padding. The transpose of `_Combine`."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan = plan
        return gather_padded(x_MD, plan.row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RD: Tensor) -> tuple[Tensor, None]:
        return combine_rows(d_RD.contiguous(), ctx.plan.row_csr), None


class _Combine(Function):
    """Expert rows [R, D] -> sums of a row's own [M, D]."""

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan = plan
        return combine_rows(out_RD.contiguous(), plan.row_csr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_MD: Tensor) -> tuple[Tensor, None]:
        return gather_padded(d_MD, ctx.plan.row_R), None
