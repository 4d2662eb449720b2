"""The expert MLPs of one rank, forward and backward, block by block. No expert and no count is special.

    weights="experts"                     weights="combine"

    pre = x[row] W_up + b_up              the same            saved
    h   = activation(pre) * w             activation(pre)
    out = h W_down + w b_down             h W_down + b_down   one row per kept (row, expert)
    y   = sum of a row's outs             sum of w * out

Both are the same function, so kernels that weigh rows as they sum them, at no cost, may take the second way for the
first. They share one backward: the gradient of w is sum(activation * dh), without the outs.
With a norm behind the experts the weight cannot be folded in, y = sum of w * norm(out), and out is saved too.

Saved for the backward: the rows, the weights, and the pre-activations [R, I] in the rows' dtype (also the norm's
inputs [R, D] with a norm). Gathered rows and activations are computed again. The routing weight's gradient without
the output rows is SonicMoE's observation (arXiv 2512.14080).

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autocast import computed_in, without_autocast
from trimtab.backward import eager_backward, forward_of, needed
from trimtab.errors import ConfigError
from trimtab.experts.delayed import Defer
from trimtab.experts.expert_call import ExpertCall, ExpertGradients, TwoProducts
from trimtab.experts.expert_call import ExpertMath as ExpertMath
from trimtab.experts.expert_call import ExpertWeights as ExpertWeights
from trimtab.experts.main_grad import MainGradMode
from trimtab.experts.mlp_fused import FusedMLP, covers, number_of
from trimtab.experts.mlp_lowered import LoweredMLP
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.slots import row_dot, slot_grads, slot_weights
from trimtab.kernels.grouped import Block, Kernels
from trimtab.kernels.rows import combine_rows


def expert_mlp(
    x_MD: Tensor,
    w_MK: Tensor,
    plan: ExpertPlan,
    weights: ExpertWeights,
    math: ExpertMath,
    kernels: Kernels,
    *,
    main_grad: MainGradMode = "off",
    defer: Defer | None = None,
    products: TwoProducts | None = None,
) -> Tensor:
    """Weighted sum of each row's local experts: [M, D] in x's dtype. Local: no rank waits for another.

    Args:
        x_MD: rows; computed in the parameters' dtype, or in autocast's, see `trimtab.autocast.computed_in`.
        w_MK: routing weights of the slots that `plan` was built from; those of dropped slots are not read.
        main_grad: where the gradients of `up` and `down` go, see `trimtab.experts.main_grad`. Biases always have
            ordinary gradients.
        defer: takes the work of the weight and bias gradients at each backward; until it is done the gradients of
            the pre-activations and of the result are kept. Nobody is told of them before `DelayedGradients.run`.
        products: a recipe's, made for this call; the plan's segments are aligned for it. See `mlp_lowered`.

    Every parameter gets a gradient of its full shape, zeros where no token came. Differentiating twice raises.

    Raises:
        ConfigError: `defer` with a norm behind the experts; `products` with one, with parameters of the activation or
            with transposed weights.
    """
    if defer is not None and math.post_norm is not None:
        raise ConfigError("weight gradients cannot be delayed where a norm follows the experts")
    if products is not None and (math.post_norm is not None or math.params or weights.transposed):
        raise ConfigError(
            "a recipe takes no norm behind the experts, no activation with parameters, no transposed weights"
        )
    dtype = computed_in(weights.up)
    call = ExpertCall(
        plan=plan, math=math, kernels=kernels, weights=weights, dtype=dtype, main_grad=main_grad,
        keep=torch.is_grad_enabled(), defer=defer, products=products,
        trained=tuple(p is not None and p.requires_grad for p in weights.each),
    )  # fmt: skip
    with without_autocast():
        y: Tensor = forward_of(
            function_of(call),
            call,
            x_MD.to(dtype),
            w_MK.to(torch.promote_types(w_MK.dtype, torch.float32)),
            *call.inputs(x_MD),
            *math.params,
        )
    return y.to(x_MD.dtype)


def function_of(call: ExpertCall) -> type[Function]:
    """What computes a call, forward and backward."""
    if call.products is not None:
        return LoweredMLP
    if call.kernels.name == "triton":  # there is Triton then
        from trimtab.experts.mlp_triton import TritonMLP, fused

        if fused(call):
            return TritonMLP
    return FusedMLP if covers(call) else _ExpertMLP


class _ExpertMLP(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: ExpertCall,
        x: Tensor,
        w_MK: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        anchor: Tensor | None,
        *params: Tensor,
    ) -> Tensor:
        plan, math, kernels = call.plan, call.math, call.kernels
        given = up, down, up_bias, down_bias
        up, down, up_bias, down_bias = call.cast(*given)
        up_t, down_t = call.by_row(up), call.by_row(down)
        dtype = kernels.compute_dtype(x.dtype)
        direct = dtype == x.dtype and math.post_norm is None
        w_R1 = slot_weights(w_MK, plan).to(dtype)
        # `combine_rows` takes weights in the rows' dtype: where that is narrower than the products', they stay here.
        folded = math.folded and not (direct and kernels.weighs_sums)
        number = number_of(math.activation)
        out_RD = kernels.empty_rows(plan.row_R.shape[0], down_t.shape[2], x.dtype, plan.offsets_e)
        saved: list[Tensor] = []
        for block in call.blocks():
            e, r = block.experts, block.rows
            pre = kernels.grouped_mm(kernels.gather(x, plan.row_R[r]).to(dtype), up_t[e], block)
            if up_bias is not None:
                pre += kernels.expand(up_bias[e].to(dtype), block)
            pre = pre.to(x.dtype)  # the activation sees the bits that its backward will see
            if call.pre is not None:
                call.pre[r] = pre
            elif call.keep:
                saved.append(pre)
            h = kernels.hidden(math.activation, number, pre.to(dtype), w_R1[r] if folded else None).to(dtype)
            del pre
            out = kernels.grouped_mm(h, down_t[e], block, out_RD[r] if direct else None)
            del h
            if down_bias is not None:
                bias = kernels.expand(down_bias[e].to(dtype), block)
                out += bias * w_R1[r] if folded else bias
            if math.post_norm is not None:
                mid = out.to(x.dtype)
                if call.keep:
                    saved.append(mid)
                out = math.post_norm.forward(mid.to(dtype))
            if not direct:
                out_RD[r] = out
        ctx.call = call
        ctx.save_for_backward(x, w_MK, *given, *saved)
        return combine_rows(out_RD, plan.row_csr, None if folded else w_R1[:, 0].to(x.dtype))

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        plan, math, kernels = call.plan, call.math, call.kernels
        x, w_MK, up, down, up_bias, down_bias, *saved = ctx.saved_tensors
        _, need_x, need_w, *needs = needed(ctx)
        up, down, _, down_bias = call.cast(up, down, up_bias, down_bias, reads_up=need_x)
        up_t, down_t = call.by_row(up), call.by_row(down)
        dtype = kernels.compute_dtype(x.dtype)
        w_R1, number = slot_weights(w_MK, plan).to(dtype), number_of(math.activation)
        grads = call.gradients(needs) if call.defer is None else None
        pres = _by_block(call, saved)
        d_pres: list[Tensor] = []
        d_params = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in math.params]
        dx_RD = kernels.empty_rows(plan.row_R.shape[0], x.shape[1], x.dtype, plan.offsets_e) if need_x else None
        dw_R = w_MK.new_zeros(plan.row_R.shape[0])
        parts = iter(pres)
        for block in call.blocks():
            e, r = block.experts, block.rows
            w, pre = w_R1[r], next(parts).to(dtype)
            back = kernels.hidden_back(math.activation, number, pre, w if math.post_norm is None else None)
            d_out = kernels.gather(dy, plan.row_R[r]).to(dtype)
            down_back = down_t[e].transpose(1, 2)
            if math.post_norm is not None:
                mid = next(parts).to(dtype)
                normed, norm_back = math.post_norm.again(mid)
                dw_R[r] = row_dot(normed, d_out)
                d_out, d_norm = norm_back(d_out * w)
                del normed, norm_back
                for total, part in zip(d_params[len(math.activation.params) :], d_norm, strict=True):
                    total += part
            hw, dw = back.hidden(kernels.grouped_mm(d_out, down_back, block))
            hw = hw.to(dtype)  # where parameters of the activation are wider
            bias_rows = d_out
            if dw is not None:
                dw_R[r] = dw
                if down_bias is not None:
                    dw_R[r] += row_dot(kernels.expand(down_bias[e].to(dtype), block), d_out)
                    bias_rows = d_out * w
            if grads is not None:
                grads.weight(grads.down, hw, d_out, block)
                grads.bias(grads.down_bias, bias_rows, block)
            del hw, bias_rows, d_out
            d_pre, d_act = back.pre()
            del pre, back
            for total, part in zip(d_params, d_act, strict=False):
                total += part
            if grads is None:
                d_pres.append(d_pre)
            else:
                _up_gradients(grads, call, x, d_pre, block)
            if dx_RD is not None:
                up_back, direct = up_t[e].transpose(1, 2), dtype == x.dtype
                dx = kernels.grouped_mm(d_pre, up_back, block, dx_RD[r] if direct else None)
                if not direct:
                    dx_RD[r] = dx
            del d_pre
        d_x = None if dx_RD is None else combine_rows(dx_RD, plan.row_csr)
        d_w = slot_grads(dw_R, plan, w_MK) if need_w else None
        d_own = [d.to(p.dtype) for d, p in zip(d_params, math.params, strict=True)]
        if grads is not None:
            return (None, d_x, d_w, *grads.close(), None, *d_own)
        assert call.defer is not None
        call.defer(lambda: _delayed(call, x, w_R1, dy, pres, d_pres), call.delayed_reads(x, dy))
        return (None, d_x, d_w, None, None, None, None, None, *d_own)


def _by_block(call: ExpertCall, saved: list[Tensor]) -> list[Tensor]:
    """What was saved for each block, also if all of it was saved as one tensor."""
    return [saved[0][block.rows] for block in call.blocks()] if len(saved) == 1 else saved


def _up_gradients(grads: ExpertGradients, call: ExpertCall, x: Tensor, d_pre: Tensor, block: Block) -> None:
    if grads.up is not None:
        rows = call.kernels.gather(x, call.plan.row_R[block.rows]).to(d_pre.dtype)
        grads.weight(grads.up, rows, d_pre, block)
    grads.bias(grads.up_bias, d_pre, block)


def _delayed(
    call: ExpertCall, x: Tensor, w_R1: Tensor, dy: Tensor, pres: list[Tensor], d_pres: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters' gradients by the same operations as in the backward, from what it left."""
    grads = call.gradients(())
    activation, number = call.math.activation, number_of(call.math.activation)
    for block, pre, d_pre in zip(call.blocks(), pres, d_pres, strict=True):
        w = w_R1[block.rows]
        hw = call.kernels.hidden(activation, number, pre.to(d_pre.dtype), w).to(d_pre.dtype)
        d_out = call.kernels.gather(dy, call.plan.row_R[block.rows]).to(d_pre.dtype)
        grads.weight(grads.down, hw, d_out, block)
        grads.bias(grads.down_bias, d_out if call.weights.down_bias is None else d_out * w, block)
        _up_gradients(grads, call, x, d_pre, block)
    return grads.deliver()
