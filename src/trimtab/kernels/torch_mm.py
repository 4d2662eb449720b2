"""The backends of PyTorch alone: "torch", one `mm` per expert on the CPU, and "grouped_mm", its own grouped GEMM.

Legend: R expert rows, e experts (of a block), A and B the widths of a GEMM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import BackendError
from trimtab.kernels.api import Block, as_it_lies, put
from trimtab.kernels.buffer_pool import shared_pool
from trimtab.kernels.compiler import multiplies_bf16
from trimtab.kernels.rows import Csr, combine_rows, expand_rows, gather_padded, gather_rows
from trimtab.kernels.tensor_checks import row_major


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
        cuts, first = self.cuts(offsets_e, rows), 0
        sizes = tuple(end - start for start, end in itertools.pairwise(cuts))
        for i, after in enumerate([*cuts[2:], math.inf]):
            if not together or after - cuts[first] > together:
                part, e = slice(cuts[first], cuts[i + 1]), slice(first, i + 1)
                yield Block(e, part, offsets_e[first : i + 2] - part.start, sizes[e])
                first = i + 1

    def cuts(self, offsets_e: Tensor, rows: int) -> list[int]:
        return offsets_e.tolist()

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
        if len(values_eA) == 1:
            return values_eA
        return values_eA.repeat_interleave(torch.tensor(_sizes(block), device=values_eA.device), 0)


def _sizes(block: Block) -> Sequence[int]:
    return block.sizes or block.offsets_e.diff().tolist()


def _cut(rows_RA: Tensor, block: Block) -> tuple[Tensor, ...]:
    """The rows of each expert of the block."""
    sizes = _sizes(block)
    return (rows_RA,) if len(sizes) == 1 else torch.split(rows_RA, list(sizes))


class GroupedMMBackend:
    """PyTorch's own grouped GEMM over all experts at once, sizes on the device (in bfloat16)."""

    name = "grouped_mm"
    weighs_sums = False
    whole = True

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty_like(like, dtype=dtype)

    def blocks(self, offsets_e: Tensor, rows: int, together: int = 0) -> Iterator[Block]:
        yield Block(slice(0, offsets_e.shape[0] - 1), slice(0, rows), offsets_e)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise BackendError(f"kernels {self.name!r} have no {dtype}: use kernels 'torch' on the CPU")
        return dtype

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        return gather_padded(x, index_R) if x.device.type == "cpu" else x[index_R]  # -1 is the last row

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype, offsets_e: Tensor) -> Tensor:
        return torch.empty(rows, width, dtype=dtype, device=offsets_e.device)  # the one block holds all rows

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        self._check_widths(w_eAB.shape[1:] if w_eAB.stride(2) == 1 else w_eAB.shape[1:2], x_RA)
        y = torch.nn.functional.grouped_mm(row_major(x_RA), w_eAB.to(x_RA.dtype), offs=block.ends_e)
        if block.tail:
            y.masked_fill_((torch.arange(y.shape[0], device=y.device) >= block.offsets_e[-1])[:, None], 0)
        return y if out is None else out.copy_(y)

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        self._check_widths(out_eAB.shape[1:], a_RA)
        out_eAB, a_RA, b_RB = as_it_lies(out_eAB, a_RA, b_RB)
        dw = torch.nn.functional.grouped_mm(row_major(a_RA).t(), row_major(b_RB), offs=block.ends_e)
        if not add and out_eAB.dtype is dw.dtype:  # some GPUs leave gradients of experts without rows as they were
            torch.where(block.empty_e11, dw.new_zeros(()), dw, out=out_eAB)  # one pass over the weights
        else:
            put(out_eAB, dw.masked_fill_(block.empty_e11, 0), add)

    def grouped_sum(self, rows_RA: Tensor, block: Block) -> Tensor:
        index = torch.arange(rows_RA.shape[0], device=rows_RA.device)
        return combine_rows(rows_RA, Csr(indices=index, indptr=block.offsets_e))

    def expand(self, values_eA: Tensor, block: Block) -> Tensor:
        return expand_rows(values_eA, block.offsets_e, block.rows.stop)

    def _check_widths(self, widths: Sequence[int], rows: Tensor) -> None:
        """torch takes rows of multiples of 16 bytes alone, and says so in the middle of a call."""
        if odd := [width for width in widths if width * rows.element_size() % 16]:
            raise BackendError(
                f"torch.nn.functional.grouped_mm takes widths of multiples of 16 bytes, not {odd[0]} of {rows.dtype}: "
                "use kernels 'torch' or 'auto' on the CPU, or other widths. Under autocast its dtype is what counts",
                phase="experts",
            )
