"""Grouped FP8 products with one scale per 128 contracted values: Triton kernels for Hopper.

    blockwise_rows     y[segment i] = x[segment i] @ w[i]^T       scales of x 1 x 128, of w 128 x 128
    blockwise_groups   dw[i] = x[:, segment i] @ dy[:, segment i]^T   scales of both 1 x 128 along the segment

All operands are E4M3 with the contracted axis contiguous; segments start at multiples of 128 and their offsets are
read on the device. Each block of 128 is multiplied by the tensor cores from zero and added to a float32 sum with its
scales, so that their short accumulators never hold more than 128 products (DeepSeek-V3, arXiv 2412.19437, 3.3.2).

Not run on a GPU. Run: the same kernels in Triton's interpreter against float64, and compiled for compute capability
9.0, where they use wgmma without spilling. Importing this file needs Triton.

Legend: S rows in segments, e experts, C the contracted width, N, A and B output widths; all multiples of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.kernels.memory import count
from trimtab.kernels.triton.language import FUSED, kernel, on_device_of, tl, triton

BLOCK = 128


def _rows(  # type: ignore[no-untyped-def]
    x,  # [S, C] E4M3
    x_scale,  # [S, C / BLOCK] float32
    w,  # [e, N, C] E4M3
    w_scale,  # [e, N / BLOCK, C / BLOCK] float32
    offsets,  # [e + 1] int64
    y,  # [S, N] bfloat16
    experts,
    n,
    c,
    EXPERTS: tl.constexpr,  # the least power of two that is not below e
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: for the interpreter, which has no narrow arithmetic
):
    """One BLOCK x BLOCK tile of y. Leaves tiles behind the last segment as they were."""
    row = tl.program_id(0) * BLOCK
    tile = tl.program_id(1)
    index = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + 1 + index, mask=index < experts, other=0)
    if row >= tl.max(ends, axis=0):
        return
    expert = tl.sum(((ends <= row) & (index < experts)).to(tl.int64), axis=0)
    lane = tl.arange(0, BLOCK)
    rows = (row + lane).to(tl.int64)
    blocks = c // BLOCK
    x_at = x + rows[:, None] * c + lane[None, :]
    w_at = w + (expert * n + tile * BLOCK + lane[None, :]) * c + lane[:, None]
    x_scale_at = x_scale + rows * blocks
    w_scale_at = w_scale + (expert * (n // BLOCK) + tile) * blocks
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(blocks):
        a = tl.load(x_at + k * BLOCK)
        b = tl.load(w_at + k * BLOCK)
        if WIDE:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        scale = tl.load(x_scale_at + k) * tl.load(w_scale_at + k)
        total += tl.dot(a, b) * scale[:, None]
    columns = tile * BLOCK + lane
    tl.store(y + rows[:, None] * n + columns[None, :], total.to(y.dtype.element_ty))


def _groups(  # type: ignore[no-untyped-def]
    x,  # [A, S] E4M3
    x_scale,  # [S / BLOCK, A] float32
    dy,  # [B, S] E4M3
    dy_scale,  # [S / BLOCK, B] float32
    offsets,  # [e + 1] int64
    dw,  # [e, A, B] bfloat16
    a_width,
    b_width,
    rows,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One BLOCK x BLOCK tile of one expert's gradient; zeros where its segment is empty."""
    expert = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    a_at = (tl.program_id(1) * BLOCK + lane).to(tl.int64)
    b_at = (tl.program_id(2) * BLOCK + lane).to(tl.int64)
    first = tl.load(offsets + expert) // BLOCK
    last = tl.load(offsets + expert + 1) // BLOCK
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(first, last):
        a = tl.load(x + a_at[:, None] * rows + (k * BLOCK + lane)[None, :])
        b = tl.load(dy + b_at[None, :] * rows + (k * BLOCK + lane)[:, None])
        if WIDE:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        left = tl.load(x_scale + k * a_width + a_at)
        right = tl.load(dy_scale + k * b_width + b_at)
        total += tl.dot(a, b) * left[:, None] * right[None, :]
    at = dw + (expert * a_width + a_at)[:, None] * b_width + b_at[None, :]
    tl.store(at, total.to(dw.dtype.element_ty))


rows_kernel = kernel(_rows, "experts")
groups_kernel = kernel(_groups)  # its rows are a stride, always a multiple of 128


def blockwise_rows(
    x_SC: Tensor, x_scale: Tensor, w_eNC: Tensor, w_scale: Tensor, offsets_e: Tensor, *, wide: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """[S, N]. Rows behind the last segment are not written.

    Args:
        x_SC, w_eNC: E4M3, contiguous.
        x_scale, w_scale: [S, C / 128] and [e, N / 128, C / 128] float32, contiguous.
        offsets_e: [e + 1] int64 on the device, multiples of 128.
        wide: multiply in float32, as Triton's interpreter needs it.
        dtype: of the result.
    """
    rows, c = x_SC.shape
    experts, n, _ = w_eNC.shape
    y = x_SC.new_empty(rows, n, dtype=dtype)
    grid = (rows // BLOCK, n // BLOCK)
    count(rows, c, n)
    with on_device_of(x_SC):
        rows_kernel[grid](
            x_SC, x_scale, w_eNC, w_scale, offsets_e, y, experts, n, c, EXPERTS=triton.next_power_of_2(experts),
            BLOCK=BLOCK, WIDE=wide, num_warps=8, num_stages=3, **FUSED,
        )  # fmt: skip
    return y


def blockwise_groups(
    x_AS: Tensor, x_scale: Tensor, dy_BS: Tensor, dy_scale: Tensor, offsets_e: Tensor, *, wide: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """[e, A, B], zeros for a segment without rows.

    Args:
        x_AS, dy_BS: E4M3, contiguous.
        x_scale, dy_scale: [S / 128, A] and [S / 128, B] float32, contiguous.
        offsets_e, wide, dtype: as for `blockwise_rows`.
    """
    (a, rows), b = x_AS.shape, dy_BS.shape[0]
    experts = offsets_e.shape[0] - 1
    dw = x_AS.new_empty(experts, a, b, dtype=dtype)
    grid = (experts, a // BLOCK, b // BLOCK)
    count(a, rows, b)
    with on_device_of(x_AS):
        groups_kernel[grid](
            x_AS, x_scale, dy_BS, dy_scale, offsets_e, dw, a, b, rows, BLOCK=BLOCK, WIDE=wide, num_warps=8,
            num_stages=3, **FUSED,
        )  # fmt: skip
    return dw
