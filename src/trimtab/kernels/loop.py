"""Grouped GEMMs on the CPU with PyTorch alone: one `mm` per expert, in bfloat16 one product for neighbours of as many
rows (`trimtab.kernels.onednn`).

Legend: R expert rows, e experts (of a block), A and B the widths of a GEMM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.kernels import onednn
from trimtab.kernels.block import Block, as_it_lies, put
from trimtab.kernels.hidden import HiddenKernels
from trimtab.kernels.mkl import rows_mm
from trimtab.kernels.pages import shared_pages
from trimtab.kernels.rows import gather_rows


class LoopKernels(HiddenKernels):
    """A block is one expert, several of few rows, or several of as many rows each. For the CPU."""

    name = "loop"
    weighs_sums = True  # PyTorch sums weighted rows as fast as others
    shares = True  # a block is small

    def __init__(self) -> None:
        self.pages = shared_pages()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy has the pages of its process

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.pages.empty_like(like, dtype)

    def blocks(
        self, offsets_e: Tensor, rows: int, together: int = 0, dtype: torch.dtype | None = None
    ) -> Iterator[Block]:
        cuts, first, alike, many = offsets_e.tolist(), 0, True, onednn.pays().alike if self._levels(dtype) else 0
        sizes = tuple(end - start for start, end in itertools.pairwise(cuts))
        for i, after in enumerate([*cuts[2:], math.inf]):
            alike = alike and i + 1 < len(sizes) and sizes[i + 1] == sizes[first]
            limit = max(together, many) if alike and sizes[first] <= onednn.EACH else together
            if not together or after - cuts[first] > limit:
                part, e = slice(cuts[first], cuts[i + 1]), slice(first, i + 1)
                yield Block(e, part, offsets_e[first : i + 2] - part.start, sizes[e])
                first, alike = i + 1, True

    def segments(self, counts_e: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of each expert's segment, `counts_e` or more, with which experts in `dtype` are the fastest: [e]."""
        if not self._levels(dtype):
            return counts_e
        return torch.tensor(onednn.level(counts_e.tolist()), dtype=counts_e.dtype, device=counts_e.device)

    def _levels(self, dtype: torch.dtype | None) -> bool:
        return dtype == torch.bfloat16 and self.compute_dtype(torch.bfloat16) == dtype

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Without native instructions a float32 GEMM is four times faster than an emulated narrow one, casts included.
        native = {torch.bfloat16: onednn.native(), torch.float16: False}
        return dtype if native.get(dtype, True) else torch.float32

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        out = self.pages.empty(index_R.shape[0], x.shape[1], dtype=x.dtype)
        if not self._levels(x.dtype):  # no other segment is filled up
            return gather_rows(x, index_R, out)
        return gather_rows(x, index_R.clamp(min=0), out).index_fill_(0, (index_R < 0).nonzero()[:, 0], 0)

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype, offsets_e: Tensor) -> Tensor:
        result = self.pages.empty(rows, width, dtype=dtype)
        result[int(offsets_e[-1]) :] = 0
        return result

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self.pages.empty(x_RA.shape[0], w_eAB.shape[2], dtype=x_RA.dtype)
        if x_RA.dtype == torch.bfloat16:
            return onednn.rows_times(x_RA, w_eAB.to(x_RA.dtype), _sizes(block), out, self.pages)
        for x, w, y in zip(_cut(x_RA, block), w_eAB.unbind(), _cut(out, block), strict=True):
            rows_mm(x, w.to(x.dtype), y, self.pages, as_compiled=block.as_compiled)
        return out

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        targets, a_RA, b_RB = as_it_lies(out_eAB, a_RA, b_RB)
        if a_RA.dtype == targets.dtype == torch.bfloat16:
            onednn.weight_gradients(a_RA, b_RB, _sizes(block), targets, self.pages, add=add)
            return
        for target, a, b in zip(targets.unbind(), _cut(a_RA, block), _cut(b_RB, block), strict=True):
            if target.dtype == a.dtype:
                torch.addmm(target, a.t(), b, beta=int(add), out=target)  # beta 0 ignores what was there, even NaN
            else:
                put(target, torch.mm(a.t(), b), add)

    def grouped_sum(self, rows_RA: Tensor, block: Block) -> Tensor:
        return torch.stack([rows.sum(0) for rows in _cut(rows_RA, block)])

    def expand(self, values_eA: Tensor, block: Block) -> Tensor:
        return (
            values_eA
            if len(values_eA) == 1
            else values_eA.repeat_interleave(torch.tensor(_sizes(block), device=values_eA.device), 0)
        )


def _sizes(block: Block) -> Sequence[int]:
    return block.sizes or block.offsets_e.diff().tolist()


def _cut(rows_RA: Tensor, block: Block) -> tuple[Tensor, ...]:
    """The rows of each expert of the block."""
    sizes = _sizes(block)
    return (rows_RA,) if len(sizes) == 1 else torch.split(rows_RA, list(sizes))
