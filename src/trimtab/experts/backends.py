"""The module that computes a pass of the expert MLP, and what is kept between its passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trimtab.experts import passes
from trimtab.experts.mlp_pass import Pass


def backend_of(p: Pass, later: bool = False) -> Any:
    """The module that computes it: the first that covers it. later: weight gradients come in a call of their own."""
    name = "" if p.low_precision is not None else p.kernels.name
    if name == "cpu":
        from trimtab.experts import on_cpu

        if on_cpu.covers(p):
            return on_cpu
    if name == "triton" and not later:
        from trimtab.experts import on_triton

        if on_triton.covers(p):
            return on_triton
    return passes


def run_forward(p: Pass, keep: bool) -> list[Tensor]:
    """y, and with `keep` what a backward needs: the pre-activations, and `u` of each adapter."""
    thin = p.thin_rows() if keep and p.adapted else []
    if thin:
        p.u = p.placed(thin)
    y, pre = backend_of(p).forward(p, keep)
    return [y, pre, *thin] if keep else [y]


def run_backward(
    p: Pass, dy: Tensor, kept: Sequence[Tensor], need_x: bool, d_pre: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """`backward`, of what `run_forward` kept."""
    if p.adapted:
        p.u = p.placed(kept[1:])
    dx, dw = backend_of(p, d_pre is not None).backward(p, dy, kept[0], need_x, d_pre)
    return dx, dw


def run_gradients(p: Pass, dy: Tensor, kept: Sequence[Tensor]) -> None:
    """`gradients`, of what `run_forward` kept, of d_pre and of `v` of each adapter."""
    pre, *thin = kept
    count = len(thin) // 2  # u, then d_pre, then v
    p.u, p.v = p.placed(thin[:count]), p.placed(thin[count + 1 :])
    backend_of(p, later=True).gradients(p, dy, pre, thin[count])
