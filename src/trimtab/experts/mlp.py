"""The expert MLPs of one rank, forward and backward, block by block. No expert and no count is special.

    weights="experts"                     weights="combine"

    pre = x[row] W_up + b_up              the same            saved
    h   = activation(pre) * w             activation(pre)
    out = h W_down + w b_down             h W_down + b_down   one row per kept (row, expert)
    y   = sum of a row's outs             sum of w * out

Both are the same function, so they share one backward: the gradient of w is sum(activation * dh), without the outs.
With a norm behind the experts the weight cannot be folded in, y = sum of w * norm(out), and out is saved too.

Saved for the backward: the rows, the weights, and the pre-activations [R, I] in the rows' dtype (also the norm's
inputs [R, D] with a norm). Gathered rows and activations are computed again. The routing weight's gradient without
the output rows is SonicMoE's observation (arXiv 2512.14080).

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from trimtab.dispatch.plan import ExpertPlan
from trimtab.experts.activations import Activation, SwiGLU
from trimtab.experts.main_grad import MainGradMode
from trimtab.experts.per_group import Gradients
from trimtab.experts.slots import row_dot, slot_grads, slot_weights
from trimtab.kernels.grouped import Block, Kernels
from trimtab.kernels.rows import combine_rows


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
    """What an expert computes: its activation, the norm behind it if there is one, and where it is weighted."""

    activation: Activation = field(default_factory=SwiGLU)
    post_norm: Activation | None = None
    weights: Literal["experts", "combine"] = "experts"

    @property
    def folded(self) -> bool:
        """Whether the routing weight is taken into the hidden rows."""
        return self.weights == "experts" and self.post_norm is None

    @property
    def params(self) -> tuple[Tensor, ...]:
        return self.activation.params + (() if self.post_norm is None else self.post_norm.params)


def expert_mlp(
    x_MD: Tensor,
    w_MK: Tensor,
    plan: ExpertPlan,
    weights: ExpertWeights,
    math: ExpertMath,
    kernels: Kernels,
    *,
    main_grad: MainGradMode = "off",
) -> Tensor:
    """Weighted sum of each row's local experts: [M, D] in x's dtype. Local: no rank waits for another.

    Args:
        x_MD: rows; computed in the parameters' dtype.
        w_MK: routing weights of the slots that `plan` was built from; those of dropped slots are not read.
        main_grad: where the gradients of `up` and `down` go, see `trimtab.experts.main_grad`. Biases always have
            ordinary gradients.

    Every parameter gets a gradient of its full shape, zeros where no token came. Differentiating twice raises.
    """
    y: Tensor = _ExpertMLP.apply(  # type: ignore[no-untyped-call]
        _Call(plan, math, kernels, weights, main_grad, torch.is_grad_enabled()),
        x_MD.to(weights.up.dtype),
        w_MK.to(torch.promote_types(w_MK.dtype, torch.float32)),
        weights.up,
        weights.down,
        weights.up_bias,
        weights.down_bias,
        *math.params,
    )
    return y.to(x_MD.dtype)


@dataclass(frozen=True)
class _Call:
    """What is not differentiated. `keep`: whether a backward may come."""

    plan: ExpertPlan
    math: ExpertMath
    kernels: Kernels
    weights: ExpertWeights
    main_grad: MainGradMode
    keep: bool

    def blocks(self) -> Iterator[Block]:
        return self.kernels.blocks(self.plan.offsets_e, self.plan.row_R.shape[0])

    def by_row(self, weight: Tensor) -> Tensor:
        """A parameter, or a part of one, as [e, in, out]."""
        return weight if self.weights.transposed else weight.transpose(1, 2)

    def gradients(self, wanted: Sequence[bool]) -> list[Gradients | None]:
        """For up, down and their biases, where wanted. The parameters themselves say where `main_grad` is."""
        params = (self.weights.up, self.weights.down, self.weights.up_bias, self.weights.down_bias)
        modes: tuple[MainGradMode, ...] = (self.main_grad, self.main_grad, "off", "off")
        return [
            Gradients([param], True, mode, name) if want and param is not None else None
            for param, mode, name, want in zip(params, modes, ("up", "down", "", ""), wanted, strict=False)
        ]


class _ExpertMLP(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        x: Tensor,
        w_MK: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        *params: Tensor,
    ) -> Tensor:
        plan, math, kernels = call.plan, call.math, call.kernels
        up_t, down_t = call.by_row(up), call.by_row(down)
        dtype = kernels.compute_dtype(x.dtype)
        direct = dtype == x.dtype and math.post_norm is None
        w_R1 = slot_weights(w_MK, plan).to(dtype)
        out_RD = x.new_empty(plan.row_R.shape[0], down_t.shape[2])
        saved: list[Tensor] = []
        for block in call.blocks():
            e, r = block.experts, block.rows
            pre = kernels.grouped_mm(kernels.gather(x, plan.row_R[r]).to(dtype), up_t[e].to(dtype), block)
            if up_bias is not None:
                pre += kernels.expand(up_bias[e].to(dtype), block)
            pre = pre.to(x.dtype)  # the activation sees the bits that its backward will see
            if call.keep:
                saved.append(pre)
            h = math.activation.forward(pre.to(dtype))
            del pre
            if math.folded:
                h = h * w_R1[r]
            out = kernels.grouped_mm(h, down_t[e].to(dtype), block, out_RD[r] if direct else None)
            del h
            if down_bias is not None:
                bias = kernels.expand(down_bias[e].to(dtype), block)
                out += bias * w_R1[r] if math.folded else bias
            if math.post_norm is not None:
                mid = out.to(x.dtype)
                if call.keep:
                    saved.append(mid)
                out = math.post_norm.forward(mid.to(dtype))
            if not direct:
                out_RD[r] = out
        ctx.call = call
        ctx.save_for_backward(x, w_MK, up, down, up_bias, down_bias, *saved)
        return combine_rows(out_RD, plan.row_bags, None if math.folded else w_R1[:, 0].to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        plan, math, kernels = call.plan, call.math, call.kernels
        x, w_MK, up, down, _, down_bias, *saved = ctx.saved_tensors
        _, need_x, need_w, *need = ctx.needs_input_grad
        up_t, down_t = call.by_row(up), call.by_row(down)
        dtype = kernels.compute_dtype(x.dtype)
        w_R1 = slot_weights(w_MK, plan).to(dtype)
        d_up, d_down, d_up_bias, d_down_bias = call.gradients(need)
        d_params = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in math.params]
        dx_RD = x.new_empty(plan.row_R.shape[0], x.shape[1]) if need_x else None
        dw_R = w_MK.new_zeros(plan.row_R.shape[0])
        parts = iter(saved)
        for block in call.blocks():
            e, r = block.experts, block.rows
            w, pre = w_R1[r], next(parts).to(dtype)
            h = math.activation.forward(pre)
            d_out = kernels.gather(dy, plan.row_R[r]).to(dtype)
            down_back = down_t[e].to(dtype).transpose(1, 2)
            if math.post_norm is not None:
                mid = next(parts).to(dtype)
                dw_R[r] = row_dot(math.post_norm.forward(mid), d_out)
                d_out, d_norm = math.post_norm.backward(mid, d_out * w)
                for total, part in zip(d_params[len(math.activation.params) :], d_norm, strict=True):
                    total += part
                dh = kernels.grouped_mm(d_out, down_back, block)
                hw, bias_rows = h, d_out
            else:
                dh = kernels.grouped_mm(d_out, down_back, block)
                dw_R[r] = row_dot(h, dh)
                if down_bias is not None:
                    dw_R[r] += row_dot(kernels.expand(down_bias[e].to(dtype), block), d_out)
                hw, bias_rows = h * w, d_out if down_bias is None else d_out * w
                dh *= w
            del h
            _wgrad(d_down, call, hw, d_out, block)
            _bias_grad(d_down_bias, kernels, bias_rows, block)
            del hw, bias_rows, d_out
            d_pre, d_act = math.activation.backward(pre, dh)
            del pre, dh
            for total, part in zip(d_params, d_act, strict=False):
                total += part
            if d_up is not None:
                _wgrad(d_up, call, kernels.gather(x, plan.row_R[r]).to(dtype), d_pre, block)
            _bias_grad(d_up_bias, kernels, d_pre, block)
            if dx_RD is not None:
                up_back, direct = up_t[e].to(dtype).transpose(1, 2), dtype == x.dtype
                dx = kernels.grouped_mm(d_pre, up_back, block, dx_RD[r] if direct else None)
                if not direct:
                    dx_RD[r] = dx
            del d_pre
        d_x = None if dx_RD is None else combine_rows(dx_RD, plan.row_bags)
        d_w = slot_grads(dw_R, plan, w_MK) if need_w else None
        d_weights = (None if d is None else d.close()[0] for d in (d_up, d_down, d_up_bias, d_down_bias))
        d_own = [d.to(p.dtype) for d, p in zip(d_params, math.params, strict=True)]
        return (None, d_x, d_w, *d_weights, *d_own)


def _wgrad(gradients: Gradients | None, call: _Call, a_RA: Tensor, b_RB: Tensor, block: Block) -> None:
    if gradients is not None:
        with gradients.block(block.experts) as (out, add):
            call.kernels.grouped_wgrad(a_RA, b_RB, block, call.by_row(out), add=add)


def _bias_grad(gradients: Gradients | None, kernels: Kernels, rows_RA: Tensor, block: Block) -> None:
    if gradients is not None:
        with gradients.block(block.experts) as (out_eA, _):
            out_eA.copy_(kernels.grouped_sum(rows_RA, block))
