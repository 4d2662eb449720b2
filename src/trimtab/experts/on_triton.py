"""The expert MLP with SwiGLU on fused Triton kernels: two launches of GEMMs forward, four backward, a sum at the end of
each. Nothing gathered is kept or even made, no size is read back, no atomics: capturable in a CUDA graph.

    forward     gate_up       rows gathered on load, pre-activations and hidden rows out       -> pre, h
                grouped_rows  h W_down, each row times its routing weight                      -> out
                combine       sum of a row's outs, in the order of its slots                   -> y
    backward    hidden_grad   dy gathered on load, the activation's backward in the epilogue   -> d_pre, w h, h . dh
                weight_grad   (w h)^T dy and x^T d_pre, dy and x gathered on load              -> dW_down, dW_up
                grouped_rows  d_pre W_up                                                       -> dx rows
                combine                                                                        -> dx

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I = 2F, F expert hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.experts.expert_call import cast_weights, joined
from trimtab.experts.operands import Operands, Targets
from trimtab.experts.plan import slot_grads, slot_weights
from trimtab.kernels.api import put
from trimtab.kernels.triton.backend import TritonBackend
from trimtab.kernels.triton.moves import combine
from trimtab.kernels.triton.products import grouped_rows, weight_grad
from trimtab.kernels.triton.swiglu import gate_up, hidden_grad


def covers(o: Operands) -> bool:
    """Whether the fused kernels compute this call: SwiGLU without biases and adapters."""
    return (
        isinstance(o.kernels, TritonBackend)
        and o.word == "swiglu"
        and not o.thin
        and o.up_bias is None
        and o.down_bias is None
    )


def forward(o: Operands, keep: bool) -> tuple[Tensor, Tensor]:
    """y [M, D], and the pre-activations [R, I], none unless `keep`."""
    x, plan, launch = o.x.contiguous(), o.plan, _launch(o)
    up_eDI, down_eFD, weight_R = _read(o)
    rows, hidden = plan.row_R.shape[0], down_eFD.shape[1]
    pre = x.new_empty(rows if keep else 0, 2 * hidden)
    h = x.new_empty(rows, hidden)
    gate_up(x, plan.row_R, up_eDI.transpose(1, 2), plan.offsets_e, pre if keep else None, h, launch)
    out_RD = grouped_rows(h, down_eFD, plan.offsets_e, x.new_empty(rows, x.shape[1]), launch, scale_R=weight_R)
    return combine(out_RD, plan.row_csr), pre


def backward(
    o: Operands, dy: Tensor, pre: Tensor, targets: Targets, need_x: bool, d_pre_RI: None
) -> tuple[Tensor | None, Tensor]:
    """dx [M, D] and dw [M, K]; see `by_blocks.backward`, which is there for weight gradients that come later."""
    x, dy, plan, launch = o.x.contiguous(), dy.contiguous(), o.plan, _launch(o)
    up_eDI, down_eFD, weight_R = _read(o)
    d_pre, hw, dots = hidden_grad(dy, plan.row_R, down_eFD.transpose(1, 2), weight_R, plan.offsets_e, pre, launch)
    dw = slot_grads(dots.sum(1).to(o.w.dtype), plan, o.w)
    _write(o, targets, x, dy, hw, d_pre)
    del hw
    if not need_x:
        return None, dw
    dx_RD = x.new_empty(plan.row_R.shape[0], x.shape[1])
    grouped_rows(d_pre, up_eDI.transpose(1, 2), plan.offsets_e, dx_RD, launch)
    return combine(dx_RD, plan.row_csr), dw


def _write(o: Operands, targets: Targets, x: Tensor, dy: Tensor, hw: Tensor, d_pre: Tensor) -> None:
    up, down, *_ = targets.each
    row_R, offsets = o.plan.row_R, o.plan.offsets_e
    if down is not None:
        weight_grad(hw, dy, offsets, o.by_row(down), _launch(o), add=targets.adds[1], b_index_R=row_R)
    if up is not None:
        there = up if up.ndim < 4 or up.is_contiguous() else torch.empty_like(up).contiguous()
        add = targets.adds[0] and there is up
        weight_grad(x, d_pre, offsets, o.by_row(joined(there)), _launch(o), add=add, a_index_R=row_R)
        if there is not up:
            put(up, there, targets.adds[0])


def _read(o: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The weights as [e, in, out], and the routing weight of each expert row."""
    up, down, *_ = cast_weights(o.up, o.down, None, None, o.plan, o.x, o.kernels)
    return o.by_row(up), o.by_row(down), slot_weights(o.w, o.plan)[:, 0].float()


def _launch(o: Operands) -> Any:
    assert isinstance(o.kernels, TritonBackend)
    return o.kernels.launch
