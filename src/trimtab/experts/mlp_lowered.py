"""The expert MLPs of one rank in low precision: all experts' rows at once, because scales belong to whole tensors.

    pre = Q(x[row]) Q(W_up) + b_up                                              saved, in the rows' dtype
    h   = activation(pre) * w
    out = Q(h) Q(W_down) + w b_down
    y   = sum of a row's outs

Q is the recipe's quantisation of each operand along the axis that its product contracts; the activation sees what is
not quantised. Six products, twelve operands.

Saved for the backward: the rows, the weights and the pre-activations. The rest is made again, quantised operands too.

Legend: M rows, K slots per row, R expert rows in aligned segments, D model dim, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import eager_backward, needed
from trimtab.experts.expert_call import ExpertCall, ExpertGradients, cast_weights, joined
from trimtab.experts.grouped_linear import grouped_sum_op
from trimtab.experts.operands import row_dot
from trimtab.experts.plan import slot_grads, slot_weights
from trimtab.experts.products import GroupWeights, Kept, Products
from trimtab.experts.weight_grad import WeightGradient
from trimtab.kernels.api import put
from trimtab.kernels.rows import combine_rows, gather_padded


class LoweredMLP(Function):
    """As `mlp.expert_mlp`, for an activation without parameters, no norm behind it and weights not transposed."""

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
    ) -> Tensor:
        plan, kernels, products = call.plan, call.kernels, call.products
        assert products is not None
        assert kernels is not None
        given = up, down, up_bias, down_bias
        up, down, up_bias, down_bias = cast_weights(*given, plan, x, kernels, every=True)
        w_R1 = slot_weights(w_MK, plan).to(x.dtype)
        pre = products.up.forward(gather_padded(x, plan.row_R), _grouped(up, up_bias))
        h = call.activation.forward(pre) * w_R1  # 0 in padding: the activation of a bias must not take part in a scale
        out_RD = products.down.forward(h, _grouped(down, None))
        del h
        if down_bias is not None:
            for block in call.blocks():
                bias = kernels.expand(down_bias[block.experts], block)
                out_RD[block.rows] += bias * w_R1[block.rows]
        ctx.call = call
        ctx.save_for_backward(x, w_MK, *given, pre if call.keep else None)
        return combine_rows(out_RD, plan.row_csr)

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        plan, kernels, products = call.plan, call.kernels, call.products
        assert products is not None
        assert kernels is not None
        x, w_MK, up, down, up_bias, down_bias, pre = ctx.saved_tensors
        _, need_x, need_w, *needs = needed(ctx)
        up, down, _, down_bias = cast_weights(up, down, up_bias, down_bias, plan, x, kernels, every=True)
        wanted = needs if call.defer is None else call.trained
        w_R1 = slot_weights(w_MK, plan).to(x.dtype)
        d_out = gather_padded(dy.contiguous(), plan.row_R)
        dh = products.down.dgrad(d_out, _grouped(down, None))
        h = call.activation.forward(pre)
        dw_R = row_dot(h, dh)
        if down_bias is not None:
            for block in call.blocks():
                dw_R[block.rows] += row_dot(kernels.expand(down_bias[block.experts], block), d_out[block.rows])
        # Quantised now, also where the products come later: scales belong to this step.
        hw = products.down.keep(h * w_R1, "activation") if wanted[1] else ()
        d_out_kept = products.down.keep(d_out, "gradient") if wanted[1] else ()
        del h
        dh *= w_R1
        d_pre = call.activation.backward(pre, dh)
        del pre, dh
        dx = None
        if need_x:
            dx = combine_rows(products.up.dgrad(d_pre, _grouped(up, None)), plan.row_csr)
        rows = products.up.keep(gather_padded(x, plan.row_R), "activation") if wanted[0] else ()
        d_pre_kept = products.up.keep(d_pre, "gradient") if wanted[0] else ()
        d_w = slot_grads(dw_R, plan, w_MK) if need_w else None

        def weight_gradients() -> ExpertGradients:
            grads = call.gradients(needs)
            if grads.down is not None:
                _weight(products.down, hw, d_out_kept, grads.down)
            if grads.down_bias is not None:
                _bias(products.down, d_out * w_R1, grads.down_bias)
            if grads.up is not None:
                _weight(products.up, rows, d_pre_kept, grads.up)
            if grads.up_bias is not None:
                _bias(products.up, d_pre, grads.up_bias)
            return grads

        if call.defer is not None:
            call.defer(lambda: weight_gradients().deliver(), ())  # it reads copies
            return (None, dx, d_w, None, None, None, None, None)
        return (None, dx, d_w, *weight_gradients().close(), None)


def _weight(products: Products, x: Kept, dy: Kept, into: WeightGradient) -> None:
    direct = into.buffer.ndim < 4 or into.buffer.is_contiguous()
    out = joined(into.buffer if direct else into.buffer.new_empty(into.buffer.shape))
    products.wgrad(x, dy, [out], [into.adds and direct], True)
    if not direct:
        put(into.buffer, out.view(into.buffer.shape), into.adds)


def _bias(products: Products, dy_RB: Tensor, into: WeightGradient) -> None:
    out = into.buffer
    out.copy_(grouped_sum_op(dy_RB, products.offsets_e, out.dtype, products.name).view_as(out))


def _grouped(weight: Tensor, bias: Tensor | None) -> GroupWeights:
    return GroupWeights((weight,), () if bias is None else (bias,), True)
