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

from trimtab.autograd import forward_of, once_differentiable
from trimtab.experts.activations import activate
from trimtab.experts.adapters import Adapters, Pair
from trimtab.experts.expert_call import ExpertWeights, joined
from trimtab.experts.grouped_linear import grouped_linear
from trimtab.experts.operands import row_dot
from trimtab.experts.plan import ExpertPlan, slot_grads, slot_weights
from trimtab.experts.quantized import decoded
from trimtab.kernels.api import Backend
from trimtab.kernels.rows import combine_rows, gather_padded


def composed_experts(
    x_MD: Tensor, w_MK: Tensor, plan: ExpertPlan, weights: ExpertWeights, activation: str | Callable[[Tensor], Tensor],
    norm: Callable[[Tensor], Tensor] | None, kernels: Backend | str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """As `expert_mlp`. The functions run under the autocast of the caller, on all expert rows at once."""
    up, down, codes = joined(weights.up), weights.down, weights.codes
    up_bias, down_bias = (None if b is None else b.flatten(1).to(dtype) for b in (weights.up_bias, weights.down_bias))
    adapters = weights.adapters or Adapters()

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None, pair: Pair | None, scales: Tensor | None) -> Tensor:
        if codes is None:
            weight, turned = weight.to(dtype), weights.transposed
            y = grouped_linear(rows, weight, plan.offsets_e, bias, transposed=turned, kernels=kernels)
        else:
            y = forward_of(_CodedLinear, rows, weight, scales, codes.format, plan.offsets_e, kernels)
            if bias is not None:
                rows_R = torch.arange(rows.shape[0], device=rows.device)
                y = y + bias[torch.bucketize(rows_R, plan.offsets_e[1:-1], right=True)]
        if pair is None:
            return y
        a, b = (t.expand(down.shape[0], -1, -1).to(dtype) for t in (pair.a, pair.b))
        thin = grouped_linear(torch.nn.functional.dropout(rows, adapters.dropout), a, plan.offsets_e, kernels=kernels)
        return y + grouped_linear(thin * pair.scale, b, plan.offsets_e, kernels=kernels)

    x_RD: Tensor = forward_of(ToExperts, x_MD.to(dtype), plan, False)
    pre_RI = product(x_RD, up, up_bias, adapters.up, None if codes is None else codes.up)
    h_RF = activation(pre_RI) if callable(activation) else activate(pre_RI, activation)
    out_RD = product(h_RF.to(dtype), down, down_bias, adapters.down, None if codes is None else codes.down)
    if norm is not None:
        out_RD = norm(out_RD)
    w_MK = w_MK.to(torch.promote_types(w_MK.dtype, torch.float32))
    y: Tensor = forward_of(FromExperts, out_RD, w_MK, plan)
    return y.to(x_MD.dtype)


class _CodedLinear(Function):
    """Rows times weights that are decoded for the product, and again for the backward's: one layer's at a time."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, codes: Tensor, scales: Tensor, name: str, offsets_e: Tensor, kernels: Backend | str
    ) -> Tensor:  # fmt: skip
        ctx.options = name, kernels
        ctx.save_for_backward(codes, scales, offsets_e)
        return grouped_linear(rows, decoded(codes, scales, name, rows.dtype), offsets_e, kernels=kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (codes, scales, offsets_e), (name, kernels) = ctx.saved_tensors, ctx.options
        weight, dy = decoded(codes, scales, name, dy.dtype), dy.contiguous()
        return grouped_linear(dy, weight, offsets_e, transposed=True, kernels=kernels), *[None] * 5


class ToExperts(Function):
    """Rows [M, D] -> expert rows [R, D], once for each kept slot; zeros in padding. `back`: its transpose, the sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: ExpertPlan, back: bool) -> Tensor:
        ctx.plan, ctx.back = plan, back
        return _moved(rows, plan, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return _moved(d.contiguous(), ctx.plan, not ctx.back), None, None


def _moved(rows: Tensor, plan: ExpertPlan, back: bool) -> Tensor:
    return combine_rows(rows, plan.row_csr) if back else gather_padded(rows, plan.row_R)


class FromExperts(Function):
    """Expert rows [R, D] -> sums of weight * row [M, D], in the order of a row's slots; padding is not read.

    Backward: weight * gradient, and a dot product for the weights, for which the experts' outputs are kept. Products
    and sums are taken in the weights' dtype at least, which is that of the result.
    """

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, w_MK: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(out_RD, w_MK)
        weighted_RD = out_RD.to(torch.promote_types(out_RD.dtype, w_MK.dtype)).mul(slot_weights(w_MK, plan))
        return combine_rows(weighted_RD, plan.row_csr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor, Tensor, None]:
        out_RD, w_MK = ctx.saved_tensors
        dy_RD = gather_padded(dy_MD, ctx.plan.row_R)
        dw_MK = slot_grads(row_dot(out_RD, dy_RD).to(w_MK.dtype), ctx.plan, w_MK)
        return dy_RD.mul(slot_weights(w_MK, ctx.plan)).to(out_RD.dtype), dw_MK, None
