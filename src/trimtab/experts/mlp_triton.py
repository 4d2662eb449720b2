"""The expert MLP with SwiGLU on fused Triton kernels: two launches of GEMMs forward, four backward, a sum at the end of
each. Nothing gathered is kept or even made, no size is read back, no atomics: capturable in a CUDA graph.

    forward     gate_up       rows gathered on load, pre-activations and hidden rows out       -> pre, h
                grouped_rows  h W_down, each row times its routing weight                      -> out
                combine       sum of a row's outs, in the order of its slots                   -> y
    backward    hidden_grad   dy gathered on load, the activation's backward in the epilogue   -> d_pre, w h, h . dh
                weight_grad   (w h)^T dy and x^T d_pre, dy and x gathered on load              -> dW_down, dW_up
                grouped_rows  d_pre W_up                                                       -> dx rows
                combine                                                                        -> dx

The routing weight multiplies the output rows in float32, wherever the layer says that it is applied: the same numbers
up to rounding. Saved for the backward: the rows, the weights and the pre-activations.

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I = 2F, F expert hidden dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import eager_backward, needed
from trimtab.experts.activations import SwiGLU
from trimtab.experts.expert_call import ExpertCall
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.slots import slot_grads, slot_weights
from trimtab.kernels.triton.gate_up import gate_up
from trimtab.kernels.triton.hidden_grad import hidden_grad
from trimtab.kernels.triton.kernels import TritonKernels
from trimtab.kernels.triton.metadata import place_slots
from trimtab.kernels.triton.moves import combine
from trimtab.kernels.triton.rows_gemm import grouped_rows
from trimtab.kernels.triton.weight_grad import weight_grad
from trimtab.routing.ids import wide_ids


def fused(call: ExpertCall) -> bool:
    """Whether `TritonMLP` computes this call: SwiGLU, without biases, a norm, a recipe or delayed weight gradients."""
    plain = call.weights.up_bias is None and call.weights.down_bias is None and call.math.post_norm is None
    now = call.products is None and call.defer is None
    return plain and now and type(call.math.activation) is SwiGLU and isinstance(call.kernels, TritonKernels)


def plan_on_device(
    ids_MK: Tensor, num_experts: int, *, alignment: int = 1, num_slots: int | None = None
) -> ExpertPlan:  # fmt: skip
    """`plan_experts` in three launches; see `trimtab.kernels.triton.metadata`."""
    places = place_slots(wide_ids(ids_MK).contiguous(), num_experts, alignment=alignment, num_slots=num_slots)
    return ExpertPlan.of(places, ids_MK.shape[1])


class TritonMLP(Function):
    """What `trimtab.experts.mlp` computes for a call that is `fused`, with its inputs and outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ExpertCall,
        x: Tensor,
        w_MK: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: None,
        down_bias: None,
        anchor: None,
    ) -> Tensor:
        plan, launch = call.plan, _launch(call)
        given = up, down
        up, down, *_ = call.cast(up, down, None, None)
        x, up_eDI, down_eFD = x.contiguous(), call.by_row(up), call.by_row(down)
        rows, hidden = plan.row_R.shape[0], down_eFD.shape[1]
        pre = call.pre[:rows] if call.pre is not None else x.new_empty(rows, 2 * hidden) if call.keep else None
        h = x.new_empty(rows, hidden)
        gate_up(x, plan.row_R, up_eDI.transpose(1, 2), plan.offsets_e, pre, h, launch)
        weight_R = slot_weights(w_MK, plan)[:, 0].float()
        out_RD = grouped_rows(h, down_eFD, plan.offsets_e, x.new_empty(rows, x.shape[1]), launch, scale_R=weight_R)
        ctx.call = call
        ctx.save_for_backward(x, w_MK, *given, None, None, pre)
        return combine(out_RD, plan.row_csr)

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        plan, launch = call.plan, _launch(call)
        x, w_MK, up, down, _, _, pre = ctx.saved_tensors
        _, need_x, need_w, *needs = needed(ctx)
        up, down, *_ = call.cast(up, down, None, None, reads_up=need_x)
        dy, up_eDI, down_eFD = dy.contiguous(), call.by_row(up), call.by_row(down)
        weight_R = slot_weights(w_MK, plan)[:, 0].float()
        d_pre, hw, dots = hidden_grad(
            dy, plan.row_R, down_eFD.transpose(1, 2), weight_R, plan.offsets_e, pre, launch
        )  # fmt: skip
        d_w = slot_grads(dots.sum(1).to(w_MK.dtype), plan, w_MK) if need_w else None
        grads = call.gradients(needs)
        every = slice(0, up.shape[0])
        if grads.down is not None:
            with grads.down.block(every) as (out, add):
                weight_grad(hw, dy, plan.offsets_e, call.by_row(out), launch, add=add, b_index_R=plan.row_R)
        del hw
        if grads.up is not None:
            with grads.up.block(every) as (out, add):
                weight_grad(x, d_pre, plan.offsets_e, call.by_row(out), launch, add=add, a_index_R=plan.row_R)
        d_x = None
        if need_x:
            dx_RD = x.new_empty(plan.row_R.shape[0], x.shape[1])
            grouped_rows(d_pre, up_eDI.transpose(1, 2), plan.offsets_e, dx_RD, launch)
            d_x = combine(dx_RD, plan.row_csr)
        return (None, d_x, d_w, *grads.close(), None)


def _launch(call: ExpertCall) -> Any:
    assert isinstance(call.kernels, TritonKernels)
    return call.kernels.launch
