"""The expert MLPs of one rank, forward and backward, block by block. No expert and no count is special.

    pre = x[row] W_up + b_up          saved
    h   = activation(pre) * w         w folded in here: linear in it, and its gradient is sum(activation * dh)
    out = h W_down + w b_down         one row per kept (row, expert)
    y   = sum of a row's outs

With a norm behind the experts the weight cannot be folded in: out = norm(activation(pre) W_down + b_down) * w,
and the norm's input is saved too.

Saved for the backward: the rows, the weights, and the pre-activations [R, I] in the rows' dtype (also the norm's
inputs [R, D] with a norm). Gathered rows and activations are computed again. The routing weight's gradient without
the output rows is SonicMoE's observation (arXiv 2512.14080).

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from trimtab.dispatch.plan import ExpertPlan
from trimtab.experts.activations import Activation, SwiGLU
from trimtab.kernels.grouped import Kernels
from trimtab.kernels.rows import sum_bags


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The parameters of all local experts.

    up: [e, I, D] and down: [e, D, F]; with `transposed` [e, D, I] and [e, F, D]. Biases: [e, I] and [e, D].
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertMath:
    """What an expert computes: its activation, and the norm behind it if there is one."""

    activation: Activation = field(default_factory=SwiGLU)
    post_norm: Activation | None = None

    @property
    def params(self) -> tuple[Tensor, ...]:
        norm = () if self.post_norm is None else self.post_norm.params
        return self.activation.params + norm


def expert_mlp(
    x_MD: Tensor,
    w_MK: Tensor,
    plan: ExpertPlan,
    weights: ExpertWeights,
    math: ExpertMath,
    kernels: Kernels,
) -> Tensor:
    """Weighted sum of each row's local experts: [M, D] in x's dtype. Local: no rank waits for another.

    Args:
        x_MD: rows; computed in the parameters' dtype.
        w_MK: routing weights of the slots that `plan` was built from; those of dropped slots are not read.

    Every parameter gets a gradient of its full shape, zeros where no token came. Differentiating twice raises.
    """
    y: Tensor = _ExpertMLP.apply(  # type: ignore[no-untyped-call]
        (plan, math, kernels, weights.transposed),
        x_MD.to(weights.up.dtype),
        w_MK.to(torch.promote_types(w_MK.dtype, torch.float32)),
        weights.up,
        weights.down,
        weights.up_bias,
        weights.down_bias,
        *math.params,
    )
    return y.to(x_MD.dtype)


def _by_row(weight: Tensor, transposed: bool) -> Tensor:
    """The parameter as [e, in, out]."""
    return weight if transposed else weight.transpose(1, 2)


class _ExpertMLP(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[ExpertPlan, ExpertMath, Kernels, bool],
        x: Tensor,
        w_MK: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        *params: Tensor,
    ) -> Tensor:
        plan, math, kernels, transposed = call
        up_t, down_t = _by_row(up, transposed), _by_row(down, transposed)
        dtype = kernels.compute_dtype(x.dtype)
        keep = any(ctx.needs_input_grad)
        w_R1 = _slot_weights(w_MK, plan).to(dtype)
        out_RD = x.new_empty(plan.row_R.shape[0], down_t.shape[2])
        saved: list[Tensor] = []
        for block in kernels.blocks(plan):
            e, r = block.experts, block.rows
            pre = kernels.grouped_mm(kernels.gather(x, plan.row_R[r]).to(dtype), up_t[e].to(dtype), block)
            if up_bias is not None:
                pre += kernels.expand(up_bias[e].to(dtype), block)
            pre = pre.to(x.dtype)  # the activation sees the bits that its backward will see
            if keep:
                saved.append(pre)
            h = math.activation.forward(pre.to(dtype))
            del pre
            if math.post_norm is None:
                h = h * w_R1[r]
            out = kernels.grouped_mm(h, down_t[e].to(dtype), block, out_RD[r] if dtype == x.dtype else None)
            if down_bias is not None:
                bias = kernels.expand(down_bias[e].to(dtype), block)
                out += bias if math.post_norm is not None else bias * w_R1[r]
            if math.post_norm is not None:
                mid = out.to(x.dtype, copy=True)
                if keep:
                    saved.append(mid)
                out = math.post_norm.forward(mid.to(dtype)) * w_R1[r]
            if out.data_ptr() != out_RD[r].data_ptr():
                out_RD[r] = out
        ctx.call = call
        ctx.save_for_backward(x, w_MK, up, down, up_bias, down_bias, *saved)
        return sum_bags(out_RD, plan.row_bags)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan, math, kernels, transposed = ctx.call
        x, w_MK, up, down, up_bias, down_bias, *saved = ctx.saved_tensors
        _, need_x, need_w, need_up, need_down, need_up_bias, need_down_bias, *_ = ctx.needs_input_grad
        up_t, down_t = _by_row(up, transposed), _by_row(down, transposed)
        dtype = kernels.compute_dtype(x.dtype)
        w_R1 = _slot_weights(w_MK, plan).to(dtype)
        d_up = torch.empty_like(up) if need_up else None
        d_down = torch.empty_like(down) if need_down else None
        d_up_bias = torch.empty_like(up_bias) if need_up_bias else None
        d_down_bias = torch.empty_like(down_bias) if need_down_bias else None
        d_params = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in math.params]
        dx_RD = x.new_empty(plan.row_R.shape[0], x.shape[1]) if need_x else None
        dw_R = w_MK.new_zeros(plan.row_R.shape[0])
        parts = iter(saved)
        for block in kernels.blocks(plan):
            e, r = block.experts, block.rows
            row_R = plan.row_R[r]
            w = w_R1[r]
            pre = next(parts).to(dtype)
            h = math.activation.forward(pre)
            d_out = kernels.gather(dy, row_R).to(dtype)
            if math.post_norm is not None:
                mid = next(parts).to(dtype)
                dw_R[r] = _row_dot(math.post_norm.forward(mid), d_out)
                d_out, d_norm = math.post_norm.backward(mid, d_out * w)
                for total, part in zip(d_params[len(math.activation.params) :], d_norm, strict=True):
                    total += part
                dh = kernels.grouped_mm(d_out, down_t[e].to(dtype).transpose(1, 2), block)
                hw, bias_rows = h, d_out
            else:
                dh = kernels.grouped_mm(d_out, down_t[e].to(dtype).transpose(1, 2), block)
                dw_R[r] = _row_dot(h, dh)
                if down_bias is not None:
                    dw_R[r] += _row_dot(kernels.expand(down_bias[e].to(dtype), block), d_out)
                hw, bias_rows = h * w, d_out if down_bias is None else d_out * w
                dh *= w
            if d_down is not None:
                kernels.grouped_wgrad(hw, d_out, block, _by_row(d_down, transposed)[e])
            if d_down_bias is not None:
                d_down_bias[e] = kernels.grouped_sum(bias_rows, block)
            d_pre, d_act = math.activation.backward(pre, dh)
            for total, part in zip(d_params, d_act, strict=False):
                total += part
            if d_up is not None:
                xs = kernels.gather(x, row_R).to(dtype)
                kernels.grouped_wgrad(xs, d_pre, block, _by_row(d_up, transposed)[e])
            if d_up_bias is not None:
                d_up_bias[e] = kernels.grouped_sum(d_pre, block)
            if dx_RD is not None:
                out = dx_RD[r] if dtype == x.dtype else None
                dx = kernels.grouped_mm(d_pre, up_t[e].to(dtype).transpose(1, 2), block, out)
                if out is None:
                    dx_RD[r] = dx
        d_x = None if dx_RD is None else sum_bags(dx_RD, plan.row_bags)
        d_w = _slot_grads(dw_R, plan, w_MK) if need_w else None
        d_own = [d.to(p.dtype) for d, p in zip(d_params, math.params, strict=True)]
        return (None, d_x, d_w, d_up, d_down, d_up_bias, d_down_bias, *d_own)


def _slot_weights(w_MK: Tensor, plan: ExpertPlan) -> Tensor:
    """The routing weight of each expert row [R, 1]; 0 in padding."""
    w_N1 = torch.nn.functional.pad(w_MK.reshape(-1), (0, 1))  # the last one serves padding
    return w_N1[plan.slot_R][:, None]  # slot -1 is the last


def _slot_grads(dw_R: Tensor, plan: ExpertPlan, w_MK: Tensor) -> Tensor:
    """Gradients of expert rows back to their slots [M, K]; 0 for dropped slots."""
    slots = w_MK.numel()
    d_N1 = dw_R.new_zeros(slots + 1)
    d_N1.scatter_(0, torch.where(plan.slot_R < 0, slots, plan.slot_R), dw_R)
    return d_N1[:slots].view_as(w_MK)


def _row_dot(a_RF: Tensor, b_RF: Tensor) -> Tensor:
    """Row-wise dot products in at least float32: [R]."""
    return (a_RF * b_RF).sum(-1, dtype=torch.promote_types(a_RF.dtype, torch.float32))
