"""The backend "triton": grouped products, and weight gradients with either operand gathered on load, of all experts at
once, sizes on the device. Expert MLPs with SwiGLU take the fused kernels of `trimtab.experts.on_triton`.

    grouped_rows   y[segment i] = scale * (x[segment i] @ w[i]); weighted at the end
    weight_grad    dw[i] = a[segment i]^T @ b[segment i]; an empty segment writes zeros, or adds nothing

Legend: R rows of all segments, n rows of an operand before its gather, e experts, A and B widths.
"""

from __future__ import annotations

from torch import Tensor

from trimtab.kernels.api import Block
from trimtab.kernels.triton.glue import GluedBackend
from trimtab.kernels.triton.language import (
    Launch,
    halves,
    kernel,
    of_rows,
    of_weight,
    row_step,
    segment_tiles,
    segments_power,
    tile_of,
    tl,
    triton,
)

PART = tl.constexpr(32)
"""Columns that are written at once: the addresses of more spill."""


def _rows(  # type: ignore[no-untyped-def]
    x,  # [R, A]
    w,  # [e, A, B], any strides
    scale,  # [R] float32, only with SCALE
    offsets,  # [e + 1] int64
    y,  # [R, B]
    experts, rows, contracted, width, w_e, w_a, w_b, SCALE: tl.constexpr,
    TAIL: tl.constexpr,  # write zeros behind the last segment
    EVEN: tl.constexpr,  # the contracted width divides into steps and the output width into tiles
    WIDE: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
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
            left = of_rows(x_at, here, a < contracted, EVEN, WIDE)
            right = of_weight(w_at, a < contracted, b < width, EVEN, WIDE)
            total_RB = tl.dot(left, right, total_RB, input_precision="ieee")
        if SCALE:
            total_RB *= tl.load(scale + row + lane, mask=here, other=0.0)[:, None]
        y_at = y + row * width + (lane[:, None] * width + b[None, :])
        tl.store(y_at, total_RB.to(y.dtype.element_ty), mask=here[:, None] & (b < width)[None, :])


rows_kernel = kernel(_rows, "experts", "rows")


def grouped_rows(
    x_RA: Tensor, w_eAB: Tensor, offsets_e: Tensor, out_RB: Tensor, launch: Launch, *, scale_R: Tensor | None = None,
    zero_tail: bool = False,
) -> Tensor:  # fmt: skip
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
    tiles = launch.tiles("rows" if w_eAB.stride(1) == 1 else "across", x_RA)
    bound = (triton.cdiv(rows, tiles.m) + experts) * triton.cdiv(width, tiles.n)
    launch.run(
        rows_kernel, tiles, bound, x_RA, w_eAB, scale_R, offsets_e, out_RB, experts, rows, contracted, width,
        *w_eAB.stride(), SCALE=scale_R is not None, TAIL=zero_tail,
        EVEN=contracted % tiles.k == 0 and width % tiles.n == 0, EXPERTS=segments_power(experts),
    )  # fmt: skip
    return out_RB


def _put(total, out, i, column, a_width, b_width, out_a, out_b, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile whose first column is `column`, or add it to what is there."""
    if total.shape[1] > PART:
        left, right = halves(total)
        put(left, out, i, column, a_width, b_width, out_a, out_b, ADD)
        put(right, out, i, column + left.shape[1], a_width, b_width, out_a, out_b, ADD)
    else:
        j = column + tl.arange(0, total.shape[1])
        inside = (i < a_width)[:, None] & (j < b_width)[None, :]
        at = out + i[:, None] * out_a + j[None, :] * out_b
        if ADD:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


put = triton.jit(_put)


def _weight_grad(  # type: ignore[no-untyped-def]
    a,  # [n, A]; with GATHER_A rows may lie apart
    a_index,  # [R] int64, only with GATHER_A
    b,  # [n, B]
    b_index,  # [R] int64, only with GATHER_B
    offsets,  # [e + 1] int64
    out,  # [e, A, B], any strides and dtype
    experts, a_width, b_width, a_row, out_e, out_a, out_b, UNIT: tl.constexpr, GATHER_A: tl.constexpr,
    GATHER_B: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(a_width, BM)
    down = tl.cdiv(b_width, BN)
    for tile in range(tl.program_id(0), experts * across * down, tl.num_programs(0)):
        expert = (tile // (across * down)).to(tl.int64)
        i = (tile // down) % across * BM + tl.arange(0, BM)
        j = tile % down * BN + tl.arange(0, BN)
        first = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(0, end - first, BK):
            row = first + step  # 64 bits, in the interpreter too
            lane = tl.arange(0, BK)
            a_read = lane < end - row
            b_read = lane < end - row
            if GATHER_A:
                source = tl.load(a_index + row + lane, mask=a_read, other=-1)
                a_read = source >= 0
                a_at = a + (source[:, None] * a_row * UNIT + i[None, :])  # in this order nothing spills
            else:
                a_at = a + row * a_width + lane[:, None] * a_width + i[None, :]
            if GATHER_B:
                b_row = tl.load(b_index + row + lane, mask=b_read, other=-1)
                b_read = b_row >= 0
                b_at = b + b_row[:, None] * b_width + j[None, :]
            else:
                b_at = b + row * b_width + lane[:, None] * b_width + j[None, :]
            left = of_rows(a_at, a_read, i < a_width, EVEN, WIDE)
            right = of_rows(b_at, b_read, j < b_width, EVEN, WIDE)
            total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
        put(total, out + expert * out_e, i, tile % down * BN, a_width, b_width, out_a, out_b, ADD)


weight_grad_kernel = kernel(_weight_grad, "experts")


def weight_grad(
    a_nA: Tensor, b_nB: Tensor, offsets_e: Tensor, out_eAB: Tensor, launch: Launch, *, add: bool = False,
    a_index_R: Tensor | None = None, b_index_R: Tensor | None = None,
) -> None:  # fmt: skip
    """Into `out_eAB`, whatever it held; with `add` on top of what it held.

    Args:
        a_nA, b_nB: contiguous (an a with an index in its rows alone), one dtype; [R, *], or rows by index (-1: zeros).
        offsets_e: [e + 1] int64. out_eAB: any strides and dtype.
    """
    gathered, (experts, a_width, b_width) = a_index_R is not None or b_index_R is not None, out_eAB.shape
    tiles, (a_nA, step, unit) = launch.tiles("wgrad_gathered" if gathered else "wgrad", a_nA), row_step(a_nA)
    bound = experts * triton.cdiv(a_width, tiles.m) * triton.cdiv(b_width, tiles.n)
    launch.run(
        weight_grad_kernel, tiles, bound, a_nA, a_index_R, b_nB, b_index_R, offsets_e, out_eAB, experts, a_width,
        b_width, step, *out_eAB.stride(), UNIT=unit, GATHER_A=a_index_R is not None, GATHER_B=b_index_R is not None,
        ADD=add, EVEN=a_width % tiles.m == 0 and b_width % tiles.n == 0,
    )  # fmt: skip


class TritonBackend(GluedBackend):
    """Grouped GEMMs in Triton for CUDA devices; between them as in `GluedBackend`."""

    name = "triton"

    def __init__(self, launch: Launch | None = None) -> None:
        self.launch = Launch() if launch is None else launch

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        y = x_RA.new_empty(x_RA.shape[0], w_eAB.shape[2]) if out is None or not out.is_contiguous() else out
        grouped_rows(x_RA.contiguous(), w_eAB.to(x_RA.dtype), block.offsets_e, y, self.launch, zero_tail=block.tail)
        return y if out is None or out is y else out.copy_(y)

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        weight_grad(a_RA.contiguous(), b_RB.contiguous(), block.offsets_e, out_eAB, self.launch, add=add)
