"""The backend "torch": grouped products on the CPU with PyTorch alone: one `mm` per expert.

Legend: R expert rows, e experts (of a block), A and B the widths of a GEMM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.kernels.api import Block, as_it_lies, put
from trimtab.kernels.buffer_pool import shared_pool
from trimtab.kernels.compiler import multiplies_bf16
from trimtab.kernels.rows import gather_rows


class TorchBackend:
    """A block is one expert, or several of few rows. For the CPU."""

    name = "torch"
    weighs_sums = True  # PyTorch sums weighted rows as fast as others
    whole = False

    def __init__(self) -> None:
        self.pool = shared_pool()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy has the pool of its process

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.pool.empty_like(like, dtype)

    def blocks(self, offsets_e: Tensor, rows: int, together: int = 0) -> Iterator[Block]:
        cuts, first = offsets_e.tolist(), 0
        sizes = tuple(end - start for start, end in itertools.pairwise(cuts))
        for i, after in enumerate([*cuts[2:], math.inf]):
            if not together or after - cuts[first] > together:
                part, e = slice(cuts[first], cuts[i + 1]), slice(first, i + 1)
                yield Block(e, part, offsets_e[first : i + 2] - part.start, sizes[e])
                first = i + 1

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Without native instructions a float32 GEMM is four times faster than an emulated narrow one, casts included.
        if dtype == torch.float16 or (dtype == torch.bfloat16 and not multiplies_bf16()):
            return torch.float32
        return dtype

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        out = self.pool.empty(index_R.shape[0], x.shape[1], dtype=x.dtype)
        return gather_rows(x, index_R, out)

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype, offsets_e: Tensor) -> Tensor:
        result = self.pool.empty(rows, width, dtype=dtype)
        result[int(offsets_e[-1]) :] = 0
        return result

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self.pool.empty(x_RA.shape[0], w_eAB.shape[2], dtype=x_RA.dtype)
        for x, w, y in zip(_cut(x_RA, block), w_eAB.unbind(), _cut(out, block), strict=True):
            torch.mm(x, w.to(x.dtype), out=y)
        return out

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        targets, a_RA, b_RB = as_it_lies(out_eAB, a_RA, b_RB)
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
