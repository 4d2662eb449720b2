"""The expert MLP on a recipe's products: all experts' rows at once, because scales belong to whole tensors.

    pre = Q(x[row]) Q(W_up) + b_up                                  saved, in the rows' dtype
    out = Q(activation(pre) * w) Q(W_down) + w b_down
    y   = sum of a row's outs

The activation sees what is not quantized. Saved for the backward: the rows, the weights and the pre-activations.

Legend: M rows, K slots per row, R expert rows in aligned segments, e experts, A and B widths, D model dim, I width of
the pre-activations.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import eager_backward, needed
from trimtab.experts.expert_call import ExpertCall, ExpertGradients, joined
from trimtab.experts.lowered import Kept, LoweredProducts
from trimtab.experts.operands import row_dot
from trimtab.experts.plan import slot_grads, slot_weights
from trimtab.experts.weight_grad import WeightGradient
from trimtab.kernels.api import put
from trimtab.kernels.rows import combine_rows, gather_padded


class LoweredMLP(Function):
    """As `mlp.expert_mlp`, for an activation without parameters, no norm behind it and weights not transposed."""

    @staticmethod
    def forward(
        ctx: Any, call: ExpertCall, x: Tensor, w_MK: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
        down_bias: Tensor | None, anchor: Tensor | None,
    ) -> Tensor:  # fmt: skip
        assert call.low is not None
        plan, (ups, downs) = call.plan, call.low
        w_R1 = slot_weights(w_MK, plan).to(x.dtype)
        bias = None if up_bias is None else up_bias.flatten(1).to(x.dtype)
        pre = ups.forward(gather_padded(x, plan.row_R), _by_row(up, x), bias)
        h = call.activation.forward(pre) * w_R1  # 0 in padding: the activation of a bias must not take part in a scale
        out_RD = downs.forward(h, _by_row(down, x))
        if down_bias is not None:
            out_RD += downs.expanded(down_bias.to(x.dtype), out_RD.shape[0]) * w_R1
        ctx.call = call
        ctx.save_for_backward(x, w_MK, up, down, down_bias, pre if call.keep else None)
        return combine_rows(out_RD, plan.row_csr)

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        assert call.low is not None
        plan, (ups, downs) = call.plan, call.low
        x, w_MK, up, down, down_bias, pre = ctx.saved_tensors
        _, need_x, need_w, *needs = needed(ctx)
        wanted = needs if call.defer is None else call.trained
        w_R1 = slot_weights(w_MK, plan).to(x.dtype)
        d_out = gather_padded(dy.contiguous(), plan.row_R)
        dh = downs.dgrad(d_out, _by_row(down, x))
        h = call.activation.forward(pre)
        dw_R = row_dot(h, dh)
        if down_bias is not None:
            dw_R += row_dot(downs.expanded(down_bias.to(x.dtype), dw_R.shape[0]), d_out)
        # Quantized now, also where the products come later: scales belong to this step.
        of_down = _operands(downs, h * w_R1, d_out) if wanted[1] else None
        d_pre = call.activation.backward(pre, dh * w_R1)
        del h, dh
        dx = combine_rows(ups.dgrad(d_pre, _by_row(up, x)), plan.row_csr) if need_x else None
        of_up = _operands(ups, gather_padded(x, plan.row_R), d_pre) if wanted[0] else None

        def weight_gradients() -> ExpertGradients:
            grads = call.gradients(needs)
            for products, kept, into in ((downs, of_down, grads.down), (ups, of_up, grads.up)):
                if kept is not None and into is not None:
                    _write(products, *kept, into)
            if grads.down_bias is not None:
                _write_sums(downs, d_out * w_R1, grads.down_bias)
            if grads.up_bias is not None:
                _write_sums(ups, d_pre, grads.up_bias)
            return grads

        d_w = slot_grads(dw_R, plan, w_MK) if need_w else None
        if call.defer is not None:
            call.defer(lambda: weight_gradients().deliver(), ())  # it reads copies
            return (None, dx, d_w, None, None, None, None, None)
        return (None, dx, d_w, *weight_gradients().close(), None)


def _by_row(weight: Tensor, x: Tensor) -> Tensor:
    """[e, in, out], in x's dtype."""
    return joined(weight).to(x.dtype).mT


def _operands(products: LoweredProducts, x_RA: Tensor, dy_RB: Tensor) -> tuple[Kept, Kept]:
    return products.keep(x_RA, "activation"), products.keep(dy_RB, "gradient")


def _write(products: LoweredProducts, x: Kept, dy: Kept, into: WeightGradient) -> None:
    """Into the buffer, which may be in no memory that can be viewed as [e, I, D]."""
    direct = into.buffer.ndim < 4 or into.buffer.is_contiguous()
    out = into.buffer if direct else into.buffer.new_empty(into.buffer.shape)
    products.wgrad(x, dy, [joined(out)], [into.adds and direct], True)
    if not direct:
        put(into.buffer, out, into.adds)


def _write_sums(products: LoweredProducts, rows_RB: Tensor, into: WeightGradient) -> None:
    into.buffer.copy_(products.sums(rows_RB, into.buffer.dtype).view_as(into.buffer))
