"""Grouped GEMMs on the CPU with PyTorch alone: one `mm` per expert, one expert per block.

Legend: R expert rows, e experts (of a block), A and B the widths of a GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trimtab.kernels.block import Block, as_it_lies, put
from trimtab.kernels.hidden import HiddenKernels
from trimtab.kernels.pages import shared_pages
from trimtab.kernels.rows import gather_rows


class LoopKernels(HiddenKernels):
    """One `mm` per expert, one expert per block. For the CPU."""

    name = "loop"

    def __init__(self) -> None:
        self.pages = shared_pages()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy has the pages of its process

    def empty_like(self, like: Tensor) -> Tensor:
        return self.pages.empty_like(like)

    def blocks(self, offsets_e: Tensor, rows: int) -> Iterator[Block]:
        cuts = offsets_e.tolist()
        for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            yield Block(slice(i, i + 1), slice(start, end), offsets_e)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Without native instructions a float32 GEMM is four times faster than an emulated narrow one, casts included.
        native = {
            torch.bfloat16: torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
            torch.float16: False,
        }
        return dtype if native.get(dtype, True) else torch.float32

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        return gather_rows(x, index_R)

    def empty_rows(self, rows_RA: Tensor, width: int, dtype: torch.dtype, offsets_e: Tensor) -> Tensor:
        rows = rows_RA.new_empty(rows_RA.shape[0], width, dtype=dtype)
        rows[int(offsets_e[-1]) :] = 0
        return rows

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        return torch.mm(x_RA, w_eAB[0], out=out)

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        (target,), a_RA, b_RB = as_it_lies(out_eAB, a_RA, b_RB)
        if target.dtype == a_RA.dtype:
            torch.addmm(target, a_RA.t(), b_RB, beta=int(add), out=target)  # beta 0 ignores what was there, even NaN
        else:
            put(target, torch.mm(a_RA.t(), b_RB), add)

    def grouped_sum(self, rows_RA: Tensor, block: Block) -> Tensor:
        return rows_RA.sum(0, keepdim=True)

    def expand(self, values_eA: Tensor, block: Block) -> Tensor:
        return values_eA
