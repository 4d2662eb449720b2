"""Moving rows: a gather, and a sum over bags in the bag's order, in float32. No atomics, so the same bits each time.

Legend: n rows of the source, R rows out of the gather, M bags, D row width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.kernels.rows import Csr
from trimtab.kernels.triton.language import FUSED, kernel, on_device_of, tl, triton

BLOCK = 1024


def _gather(x, index, out, rows, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row's block of columns; zeros where the index is -1."""
    row = tl.program_id(0).to(tl.int64)
    if row >= rows:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row)
    value = tl.load(x + source * width + column, mask=column < tl.where(source >= 0, width, 0), other=0.0)
    tl.store(out + row * width + column, value, mask=column < width)


def _combine(rows, index, offsets, out, bags, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One bag's block of columns."""
    bag = tl.program_id(0).to(tl.int64)
    if bag >= bags:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(tl.load(offsets + bag), tl.load(offsets + bag + 1)):
        source = tl.load(index + i)
        total += tl.load(rows + source * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + bag * width + column, total.to(out.dtype.element_ty), mask=column < width)


gather_kernel = kernel(_gather, "rows")
combine_kernel = kernel(_combine, "bags")


def gather(x_nD: Tensor, index_R: Tensor) -> Tensor:
    """x[index], and a row of zeros where the index is -1: [R, D]. x contiguous."""
    (rows,), width = index_R.shape, x_nD.shape[1]
    out = x_nD.new_empty(rows, width)
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (max(rows, 1), triton.cdiv(width, block))  # a grid has a program at least
    with on_device_of(x_nD):
        gather_kernel[grid](x_nD, index_R, out, rows, width, BLOCK=block, num_warps=4, **FUSED)
    return out


def combine(rows_nD: Tensor, csr: Csr) -> Tensor:
    """Sum of each bag's rows in its order, in float32, rounded once: [M, D]. rows contiguous."""
    bag_count, width = csr.indptr.shape[0] - 1, rows_nD.shape[1]
    out = torch.empty(bag_count, width, dtype=rows_nD.dtype, device=rows_nD.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (max(bag_count, 1), triton.cdiv(width, block))
    with on_device_of(rows_nD):
        combine_kernel[grid](rows_nD, csr.indices, csr.indptr, out, bag_count, width, BLOCK=block, num_warps=4, **FUSED)
    return out
