"""Grouped GEMM over rows: y[segment i] = scale * (x[segment i] @ w[i]); weighted at the end.

Legend: R rows of all segments, e segments, A contracted width, B output width.
"""

from __future__ import annotations

from torch import Tensor

from trimtab.kernels.triton.language import (
    Launch,
    kernel,
    on_device_of,
    segment_tiles,
    segments_power,
    tile_of,
    tl,
    triton,
)


def _rows(  # type: ignore[no-untyped-def]
    x,  # [R, A]
    w,  # [e, A, B], any strides
    scale,  # [R] float32, only with SCALE
    offsets,  # [e + 1] int64
    y,  # [R, B]
    experts,
    rows,
    contracted,
    width,
    w_e,
    w_a,
    w_b,
    SCALE: tl.constexpr,
    TAIL: tl.constexpr,  # write zeros behind the last segment
    EVEN: tl.constexpr,  # the contracted width divides into steps and the output width into tiles
    WIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    columns = tl.cdiv(width, BN)
    total = segment_tiles(offsets, experts, rows, TAIL, EXPERTS, BM) * columns
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, column = tile_of(offsets, experts, rows, tile, columns, TAIL, EXPERTS, BM)
        lane = tl.arange(0, BM)
        here = lane < (end - row).to(tl.int32)
        first = row * contracted  # 64 bits once, 32 for each row: fewer registers
        b = column * BN + tl.arange(0, BN)
        total_RB = tl.zeros((BM, BN), dtype=tl.float32)
        steps = tl.where(expert < experts, contracted, 0)  # the tail multiplies nothing
        for step in range(0, steps, BK):
            a = step + tl.arange(0, BK)
            x_at = x + first + lane[:, None] * contracted + a[None, :]
            w_at = w + expert * w_e + a[:, None] * w_a + b[None, :] * w_b
            if EVEN:
                left = tl.load(x_at, mask=here[:, None], other=0.0)
                right = tl.load(w_at)
            else:
                left = tl.load(x_at, mask=here[:, None] & (a < contracted)[None, :], other=0.0)
                right = tl.load(w_at, mask=(a < contracted)[:, None] & (b < width)[None, :], other=0.0)
            if WIDE:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total_RB = tl.dot(left, right, total_RB, input_precision="ieee")
        if SCALE:
            total_RB *= tl.load(scale + row + lane, mask=here, other=0.0)[:, None]
        y_at = y + row * width + lane[:, None] * width + b[None, :]
        tl.store(y_at, total_RB.to(y.dtype.element_ty), mask=here[:, None] & (b < width)[None, :])


rows_kernel = kernel(_rows, "experts", "rows")


def grouped_rows(
    x_RA: Tensor,
    w_eAB: Tensor,
    offsets_e: Tensor,
    out_RB: Tensor,
    launch: Launch,
    *,
    scale_R: Tensor | None = None,
    zero_tail: bool = False,
) -> Tensor:
    """Into `out_RB`, and that.

    Args:
        x_RA: contiguous.
        w_eAB: any strides, x's dtype.
        offsets_e: [e + 1] int64.
        out_RB: contiguous, any dtype.
        scale_R: float32, each row's factor.
        zero_tail: rows behind the last segment come out zero; without it they are left as they are.
    """
    (experts, contracted, width), rows = w_eAB.shape, out_RB.shape[0]
    tiles = launch.tiles(launch.rows if w_eAB.stride(1) == 1 else launch.across, x_RA.dtype)
    bound = (triton.cdiv(rows, tiles.m) + experts) * triton.cdiv(width, tiles.n)
    with on_device_of(x_RA):
        rows_kernel[launch.grid(x_RA.device, tiles, bound)](
            x_RA, w_eAB, scale_R, offsets_e, out_RB, experts, rows, contracted, width, *w_eAB.stride(),
            SCALE=scale_R is not None, TAIL=zero_tail,
            EVEN=contracted % tiles.k == 0 and width % tiles.n == 0, WIDE=launch.wide, EXPERTS=segments_power(experts),
            **tiles.options(),
        )  # fmt: skip
    return out_RB
