"""The backend "grouped_mm+triton": PyTorch's grouped GEMM, and between its products kernels bound by memory alone, each
one launch. They have no tiles to tune, so that they are as good on any GPU.

    activate            h = w * f(pre)
    activate_backward   d_pre = w * dh * f'(pre), w * h for the gradient of down, and the routing weight's gradient,
                        sum(h * dh), into its slot
    write_gradient      dw[e], zeros for an expert without rows, into a buffer or on top of it

Rows that no slot is behind are neither read nor written: they lie behind the last segment, where nobody reads.

Legend: M rows, K slots per row, R expert rows, e experts, F expert hidden dim, I width of the pre-activations, A and B
widths of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.kernels.api import Block, as_it_lies
from trimtab.kernels.rows import Csr
from trimtab.kernels.tensor_checks import row_major
from trimtab.kernels.torch_mm import GroupedMMBackend
from trimtab.kernels.triton import GATED, WORDS
from trimtab.kernels.triton.language import FUSED, kernel, on_device_of, tl, triton
from trimtab.kernels.triton.moves import BLOCK, block_of, combine, gather, place_slots


def _slope(x, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """s(x) and s'(x) of `WORDS[ACT]`."""
    if ACT == 0:
        gate = tl.sigmoid(x)
        value = x * gate
        slope = gate * (1 + x - value)
    elif ACT == 5:
        positive = tl.where(x < 0, 0.0, x)  # NaN stays
        value = positive * positive
        slope = 2 * positive
    elif (ACT == 1) | (ACT == 3):
        half = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * half
        slope = half + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:  # 0.5 * (1 + tanh(z)) is sigmoid(2 z)
        half = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        value = x * half
        slope = half + value * (1 - half) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return value, slope


slope_of = triton.jit(_slope)


def _activate(  # type: ignore[no-untyped-def]
    pre,  # [R, I]
    w,  # [M * K] float32
    slot_R,  # [R] int64
    h,  # [R, F]
    hidden, ACT: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_R + row)
    if slot >= 0:
        f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = f < hidden
        at = pre + row * ((2 if GATE else 1) * hidden) + f
        out, _ = slope_of(tl.load(at, mask=inside, other=0.0).to(tl.float32), ACT)
        if GATE:
            out *= tl.load(at + hidden, mask=inside, other=0.0).to(tl.float32)
        out *= tl.load(w + slot)
        tl.store(h + row * hidden + f, out.to(h.dtype.element_ty), mask=inside)


def _activate_backward(  # type: ignore[no-untyped-def]
    pre,  # [R, I]
    dh,  # [R, F]
    w,  # [M * K] float32
    slot_R,  # [R] int64
    more_R,  # [R], added to the routing weight's gradient, only with MORE
    d_pre,  # [R, I]
    hw,  # [R, F], only with WEIGHTED
    dw,  # [M * K] float32
    hidden, ACT: tl.constexpr, GATE: tl.constexpr, WEIGHTED: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its columns are added up in one order."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_R + row)
    if slot >= 0:
        weight = tl.load(w + slot)
        dots = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, hidden, BLOCK):
            f = first + tl.arange(0, BLOCK)
            inside = f < hidden
            start = row * ((2 if GATE else 1) * hidden) + f
            value, slope = slope_of(tl.load(pre + start, mask=inside, other=0.0).to(tl.float32), ACT)
            d = tl.load(dh + row * hidden + f, mask=inside, other=0.0).to(tl.float32)
            weighted = d * weight
            out = value
            if GATE:
                up = tl.load(pre + start + hidden, mask=inside, other=0.0).to(tl.float32)
                out *= up
                tl.store(d_pre + start + hidden, (weighted * value).to(d_pre.dtype.element_ty), mask=inside)
                slope *= up
            tl.store(d_pre + start, (weighted * slope).to(d_pre.dtype.element_ty), mask=inside)
            if WEIGHTED:
                tl.store(hw + row * hidden + f, (out * weight).to(hw.dtype.element_ty), mask=inside)
            dots += out * d
        dot = tl.sum(dots, axis=0)
        if MORE:
            dot += tl.load(more_R + row).to(tl.float32)
        tl.store(dw + slot, dot)


def _write(made, offsets, out, size, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of one expert's gradient; what was made for an expert without rows is not read."""
    expert = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(offsets + expert + 1) - tl.load(offsets + expert)
    read = place < tl.where(rows > 0, size, 0)
    value = tl.load(made + expert * size + place, mask=read, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(out + expert * size + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + expert * size + place, value.to(out.dtype.element_ty), mask=place < size)


activate_kernel = kernel(_activate)
activate_backward_kernel = kernel(_activate_backward)
write_kernel = kernel(_write)


def activate(word: str, pre_RI: Tensor, w_MK: Tensor, slot_R: Tensor) -> Tensor:
    """h [R, F], weighted. pre, w contiguous; w float32; word: one of `WORDS`."""
    act, rows = WORDS.index(word), pre_RI.shape[0]
    hidden = pre_RI.shape[1] // (2 if act < GATED else 1)
    h, block = pre_RI.new_empty(rows, hidden), block_of(hidden)
    if rows:
        with on_device_of(pre_RI):
            activate_kernel[(rows, triton.cdiv(hidden, block))](
                pre_RI, w_MK, slot_R, h, hidden, ACT=act, GATE=act < GATED, BLOCK=block, num_warps=4, **FUSED
            )
    return h


def activate_backward(
    word: str, pre_RI: Tensor, dh_RF: Tensor, w_MK: Tensor, slot_R: Tensor, more_R: Tensor | None, weighted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(d_pre [R, I], w * h [R, F] if it is asked for, dw [M, K]). All contiguous. more_R: a part of dw by itself."""
    act, (rows, hidden) = WORDS.index(word), dh_RF.shape
    d_pre, hw = torch.empty_like(pre_RI), torch.empty_like(dh_RF) if weighted else None
    dw = torch.zeros_like(w_MK)
    if rows:
        with on_device_of(pre_RI):
            activate_backward_kernel[(rows,)](
                pre_RI, dh_RF, w_MK, slot_R, more_R, d_pre, hw, dw, hidden, ACT=act, GATE=act < GATED,
                WEIGHTED=weighted, MORE=more_R is not None, BLOCK=block_of(hidden), num_warps=4, **FUSED,
            )  # fmt: skip
    return d_pre, hw, dw


def write_gradient(made_eAB: Tensor, offsets_e: Tensor, out_eAB: Tensor, add: bool) -> None:
    """Both contiguous; out of any floating dtype."""
    experts, size = made_eAB.shape[0], made_eAB.shape[1:].numel()
    if experts and size:
        with on_device_of(made_eAB):
            write_kernel[(triton.cdiv(size, BLOCK), experts)](
                made_eAB, offsets_e, out_eAB, size, ADD=add, BLOCK=BLOCK, num_warps=4, **FUSED
            )


class GluedBackend(GroupedMMBackend):
    """Grouped GEMMs of PyTorch; rows are planned, moved, activated and summed by Triton, on CUDA devices."""

    name = "grouped_mm+triton"
    words = WORDS

    place_on_device, gather_padded = staticmethod(place_slots), staticmethod(gather)

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        return gather(x, index_R)

    def combine(self, rows_nD: Tensor, csr: Csr, weights_n: Tensor | None = None) -> Tensor:
        assert weights_n is None, "they are in the rows"
        return combine(rows_nD, csr)

    def activate(self, word: str, pre_RI: Tensor, w_MK: Tensor, slot_R: Tensor) -> Tensor:
        return activate(word, pre_RI.contiguous(), w_MK.contiguous(), slot_R)

    def activate_backward(self, word: str, pre_RI: Tensor, dh_RF: Tensor, w_MK: Tensor, *more: Any) -> Any:
        return activate_backward(word, pre_RI.contiguous(), dh_RF, w_MK.contiguous(), *more)

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        out, a, b = as_it_lies(out_eAB, a_RA, b_RB)
        if not out.is_contiguous():
            super().grouped_wgrad(a_RA, b_RB, block, out_eAB, add=add)
            return
        self._check_widths(out.shape[1:], a)
        made = torch.nn.functional.grouped_mm(row_major(a).t(), row_major(b), offs=block.ends_e)
        write_gradient(made.contiguous(), block.offsets_e, out, add)
