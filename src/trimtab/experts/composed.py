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
from trimtab.errors import ConfigError
from trimtab.experts.activations import activate
from trimtab.experts.expert_rows import FromExperts, ToExperts
from trimtab.experts.grad_sink import GradSink
from trimtab.experts.grouped_linear import grouped_linear
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.product import joined
from trimtab.experts.quantized import decoded
from trimtab.experts.weight import GroupedWeight
from trimtab.kernels.api import Backend


def composed_experts(
    x_MD: Tensor, w_MK: Tensor, plan: ExpertPlan, up_weight: GroupedWeight, down_weight: GroupedWeight,
    activation: str | Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor] | None, kernels: Backend | str,
    dtype: torch.dtype, sink: GradSink, low_precision: object,
) -> Tensor:  # fmt: skip
    """As `expert_mlp`. The functions run under the autocast of the caller, on all expert rows at once."""
    if not sink.ordinary or low_precision is not None:
        raise ConfigError("main_grad, delayed weight gradients and recipes take no function of one's own")

    def product(rows: Tensor, of: GroupedWeight) -> Tensor:
        bias = of.biases[0].flatten(1).to(dtype) if of.biases else None
        if not of.format:
            weight = joined(of.values[0]).to(dtype)
            y = grouped_linear(rows, weight, plan.offsets_e, bias, transposed=of.transposed, kernels=kernels)
        else:
            assert of.scales is not None
            codes, scales = joined(of.values[0]), joined(of.scales)
            y = forward_of(_CodedLinear, rows, codes, scales, of.format, plan.offsets_e, kernels)
            if bias is not None:
                rows_R = torch.arange(rows.shape[0], device=rows.device)
                y = y + bias[torch.bucketize(rows_R, plan.offsets_e[1:-1], right=True)]
        if of.lora is None:
            return y
        a, b = (t.expand(of.groups, -1, -1).to(dtype) for t in (of.lora.a, of.lora.b))
        dropped = torch.nn.functional.dropout(rows, of.lora.dropout)
        thin = grouped_linear(dropped, a, plan.offsets_e, kernels=kernels)
        return y + grouped_linear(thin * of.lora.scale, b, plan.offsets_e, kernels=kernels)

    x_RD: Tensor = forward_of(ToExperts, x_MD.to(dtype), plan, False)
    pre_RI = product(x_RD, up_weight)
    h_RF = activation(pre_RI) if callable(activation) else activate(pre_RI, activation)
    out_RD = product(h_RF.to(dtype), down_weight)
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
