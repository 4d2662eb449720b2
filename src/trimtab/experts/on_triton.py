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

import torch
from torch import Tensor

from trimtab.experts.matrix import by_row, cast, joined
from trimtab.experts.passes import Pass
from trimtab.experts.plan import slot_grads, slot_weights
from trimtab.kernels.api import put
from trimtab.kernels.triton.moves import combine
from trimtab.kernels.triton.products import TritonBackend, grouped_rows, weight_grad
from trimtab.kernels.triton.swiglu import gate_up, hidden_grad


def covers(p: Pass) -> bool:
    """Whether the fused kernels compute this call: SwiGLU of stacked values alone."""
    return (
        isinstance(p.kernels, TritonBackend)
        and p.word == "swiglu"
        and all(weight.stacked and len(weight.tensors()) == 1 for weight in (p.up, p.down))
    )


def forward(p: Pass, keep: bool) -> tuple[Tensor, Tensor | None]:
    """y [M, D], and with `keep` the pre-activations [R, I]."""
    x, plan, launch = p.x, p.plan, p.kernels.launch  # type: ignore[attr-defined]
    up_eDI, down_eFD, weight_R = _read(p)
    rows, hidden = plan.row_R.shape[0], down_eFD.shape[1]
    pre = x.new_empty(rows if keep else 0, 2 * hidden)
    h = x.new_empty(rows, hidden)
    gate_up(x, plan.row_R, up_eDI.transpose(1, 2), plan.offsets_e, pre if keep else None, h, launch)
    out_RD = grouped_rows(h, down_eFD, plan.offsets_e, x.new_empty(rows, x.shape[1]), launch, scale_R=weight_R)
    return combine(out_RD, plan.row_csr), pre


def backward(p: Pass, dy: Tensor, pre: Tensor, need_x: bool, d_pre_RI: None) -> tuple[Tensor | None, Tensor]:
    """dx [M, D] and dw [M, K]; see `passes.backward`, which is there for weight gradients that come later."""
    x, dy, plan, launch = p.x, dy.contiguous(), p.plan, p.kernels.launch  # type: ignore[attr-defined]
    up_eDI, down_eFD, weight_R = _read(p)
    d_pre, hw, dots = hidden_grad(dy, plan.row_R, down_eFD.transpose(1, 2), weight_R, plan.offsets_e, pre, launch)
    dw = slot_grads(dots.sum(1).to(p.w.dtype), plan, p.w)
    _write(p, x, dy, hw, d_pre)
    del hw
    if not need_x:
        return None, dw
    dx_RD = x.new_empty(plan.row_R.shape[0], x.shape[1])
    grouped_rows(d_pre, up_eDI.transpose(1, 2), plan.offsets_e, dx_RD, launch)
    return combine(dx_RD, plan.row_csr), dw


def _write(p: Pass, x: Tensor, dy: Tensor, hw: Tensor, d_pre: Tensor) -> None:
    row_R, offsets, launch = p.plan.row_R, p.plan.offsets_e, p.kernels.launch  # type: ignore[attr-defined]
    up_sink, down_sink = p.sinks
    if down_sink is not None and (down := down_sink.into[0]) is not None:
        there = by_row(down, p.down.transposed)
        weight_grad(hw, dy, offsets, there, launch, add=down_sink.adds[0], b_index_R=row_R)
    if up_sink is not None and (up := up_sink.into[0]) is not None:
        there = up if up.ndim < 4 or up.is_contiguous() else torch.empty_like(up).contiguous()
        add = up_sink.adds[0] and there is up
        weight_grad(x, d_pre, offsets, by_row(joined(there), p.up.transposed), launch, add=add, a_index_R=row_R)
        if there is not up:
            put(up, there, up_sink.adds[0])


def _read(p: Pass) -> tuple[Tensor, Tensor, Tensor]:
    """The weights as [e, in, out], and the routing weight of each expert row."""
    up, down = (by_row(cast(joined(w.values[0]), p.x.dtype, p.kernels), w.transposed) for w in (p.up, p.down))
    return up, down, slot_weights(p.w, p.plan)[:, 0].float()
