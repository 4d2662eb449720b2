"""What lies between the two products of an expert MLP, by PyTorch's own kernels: a pass over memory or more a formula.

    forward    h = f(pre) * w
    backward   h again, and from dh: h * w, dw = sum(h * dh) over a row, d_pre by f's backward from dh * w

Legend: R expert rows of a block, I width of the pre-activations, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

Gradients = tuple[Tensor, Sequence[Tensor]]
"""Of pre [R, I] and of each parameter of f."""


class RowFunction(Protocol):
    """f, as `trimtab.experts.activations` has it."""

    def forward(self, pre_RI: Tensor) -> Tensor: ...

    def backward(self, pre_RI: Tensor, dh_RF: Tensor) -> Gradients: ...

    def again(self, pre_RI: Tensor) -> tuple[Tensor, Callable[[Tensor], Gradients]]: ...


def row_dot(a_RF: Tensor, b_RF: Tensor) -> Tensor:
    """Row-wise dot products in at least float32: [R]."""
    return (a_RF * b_RF).sum(-1, dtype=torch.promote_types(a_RF.dtype, torch.float32))


class HiddenBack:
    """The backward of one block, in steps so that no more is held at a time than must be: `hidden`, then `pre`."""

    def __init__(self, f: RowFunction, pre_RI: Tensor, w_R1: Tensor | None, *, shares: bool) -> None:
        self._w = w_R1
        self._h: Tensor | None
        self._backward: Callable[[Tensor], Gradients]
        self._h, self._backward = f.again(pre_RI) if shares else (f.forward(pre_RI), partial(f.backward, pre_RI))

    def hidden(self, dh_RF: Tensor) -> tuple[Tensor, Tensor | None]:
        """h * w [R, F], and w's gradient [R] if there is a w. `dh` is not the caller's any more."""
        h, w, self._h, self._dh = self._h, self._w, None, dh_RF
        assert h is not None
        if w is None:
            return h, None
        dw, hw = row_dot(h, dh_RF), h * w
        dh_RF *= w
        return hw, dw

    def pre(self) -> Gradients:
        """The gradients of `pre` [R, I] and of f's parameters. Once, after `hidden`."""
        return self._backward(self._dh)


class HiddenKernels:
    """Part of every set of kernels, see `trimtab.kernels.grouped.Kernels`."""

    shares = False
    """Whether a gate's factor of h is kept for the backward: time for memory, R F more at its peak."""

    def hidden(self, f: RowFunction, number: int | None, pre_RI: Tensor, w_R1: Tensor | None) -> Tensor:
        h = f.forward(pre_RI)
        return h if w_R1 is None else h * w_R1

    def hidden_back(self, f: RowFunction, number: int | None, pre_RI: Tensor, w_R1: Tensor | None) -> HiddenBack:
        return HiddenBack(f, pre_RI, w_R1, shares=self.shares)
