"""What lies between the products of experts in one pass of C++, forward and backward: cpu/elementwise.h.

Legend: R expert rows, F expert hidden dim, I what an activation reads of it: 2 F if gated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.kernels.abi import ACTIVATIONS
from trimtab.kernels.hidden import HiddenBack

if TYPE_CHECKING:
    from trimtab.kernels.compiled import CompiledKernels

CLAMPED = ACTIVATIONS.index("clamped_swiglu")
"""The last of those that are gated."""


class OnePass(HiddenBack):
    """By cpu/elementwise.h: all at once when dh is there, h * w in its place."""

    def __init__(self, kernels: CompiledKernels, number: int, pre_RI: Tensor, w_R1: Tensor | None) -> None:
        self._kernels, self._number, self._pre, self._w = kernels, number, pre_RI, w_R1

    def hidden(self, dh_RF: Tensor) -> tuple[Tensor, Tensor | None]:
        shape = self._pre.shape[0], hidden_width(self._number, self._pre)
        if dh_RF.shape != shape or dh_RF.dtype != self._pre.dtype:
            got = f"{tuple(dh_RF.shape)} in {dh_RF.dtype}"
            raise InputError(f"a gradient {got} of hidden rows {shape} in {self._pre.dtype}", phase="experts")
        h = dh_RF.contiguous()
        self._d_pre = self._kernels.empty(*self._pre.shape, dtype=h.dtype)
        dw = None if self._w is None else torch.empty(shape[0], dtype=h.dtype, device="cpu")
        self._kernels.between("backward", self._number, pre=self._pre, w=self._w, h=h, d_pre=self._d_pre, dw=dw)
        return h, dw

    def pre(self) -> tuple[Tensor, Sequence[Tensor]]:
        return self._d_pre, ()


def in_one_pass(number: int, pre_RI: Tensor, w_R1: Tensor | None) -> bool:
    """Whether cpu/elementwise.h computes it."""
    floats = [t for t in (pre_RI, w_R1) if t is not None]
    plain = all(t.dtype == torch.float32 and t.is_contiguous() and t.device.type == "cpu" for t in floats)
    fits = w_R1 is None or w_R1.shape == (pre_RI.shape[0], 1)
    return plain and fits and number != CLAMPED and (number > CLAMPED or pre_RI.shape[1] % 2 == 0)


def hidden_width(number: int, pre_RI: Tensor) -> int:
    return pre_RI.shape[1] // 2 if number <= CLAMPED else pre_RI.shape[1]
