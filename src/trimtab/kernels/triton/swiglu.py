"""The first grouped product of a SwiGLU expert, forward and backward: rows gathered on load, the activation in the
epilogue.

    gate_up       pre = x[index] @ up^T          [gate | up], kept for the backward, rounded as stored
                  h   = silu(gate) * up          of the rounded values: what the backward will see
    hidden_grad   dh    = dy[index] @ down       not kept
                  d_pre = weight * dh * d activation
                  hw    = weight * h             for the gradient of down
                  dots  = h * dh, summed over a tile's columns: added in order by the caller, without atomics, they are
                          the routing weight's gradient (SonicMoE, arXiv 2512.14080)

Legend: R rows of all segments, n rows of x, e experts, D model dim, F hidden dim, C column tiles.
"""

from __future__ import annotations

from torch import Tensor

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


def _gate_up(  # type: ignore[no-untyped-def]
    x,  # [n, D]
    index,  # [R] int64
    up,  # [e, 2F, D]
    offsets,  # [e + 1] int64
    pre,  # [R, 2F], only with KEEP
    h,  # [R, F]
    experts, rows, dim, hidden, x_row, up_e, up_i, up_d, UNIT: tl.constexpr, KEEP: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(hidden, BN)
    total = segment_tiles(offsets, experts, rows, False, EXPERTS, BM) * columns
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, column = tile_of(offsets, experts, rows, tile, columns, False, EXPERTS, BM)
        lane = tl.arange(0, BM)
        here = lane < (end - row).to(tl.int32)
        source = tl.load(index + row + lane, mask=here, other=-1)
        read = source >= 0
        f = column * BN + tl.arange(0, BN)
        gate = tl.zeros((BM, BN), dtype=tl.float32)
        value = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(0, dim, BK):
            d = step + tl.arange(0, BK)
            x_at = x + source[:, None] * (x_row * UNIT) + d[None, :]
            gate_at = up + expert * up_e + d[:, None] * up_d + f[None, :] * up_i
            left = of_rows(x_at, read, d < dim, EVEN, WIDE)
            right = of_weight(gate_at, d < dim, f < hidden, EVEN, WIDE)
            other = of_weight(gate_at + hidden * up_i, d < dim, f < hidden, EVEN, WIDE)
            gate = tl.dot(left, right, gate, input_precision="ieee")
            value = tl.dot(left, other, value, input_precision="ieee")
        written = here[:, None] & (f < hidden)[None, :]
        gate = gate.to(h.dtype.element_ty)
        value = value.to(h.dtype.element_ty)
        if KEEP:
            pre_at = pre + row * (2 * hidden) + lane[:, None] * (2 * hidden) + f[None, :]
            tl.store(pre_at, gate, mask=written)
            tl.store(pre_at + hidden, value, mask=written)
        gate = gate.to(tl.float32)
        out = gate * tl.sigmoid(gate) * value.to(tl.float32)
        tl.store(h + row * hidden + lane[:, None] * hidden + f[None, :], out.to(h.dtype.element_ty), mask=written)


gate_up_kernel = kernel(_gate_up, "experts", "rows")


def gate_up(
    x_nD: Tensor, index_R: Tensor, up_eID: Tensor, offsets_e: Tensor, pre_RI: Tensor | None, h_RF: Tensor,
    launch: Launch,
) -> None:  # fmt: skip
    """Into `pre_RI` [R, 2F], if there is one, and `h_RF`, both contiguous; rows behind the last segment are left.

    Args:
        x_nD: rows may be parts of longer ones. index_R: int64 rows of x, -1 for a row of zeros.
        up_eID: [e, 2F, D], gate first, any strides, x's dtype.
        offsets_e: [e + 1] int64.
    """
    (experts, _, dim), (rows, hidden), (x_nD, step, unit) = up_eID.shape, h_RF.shape, row_step(x_nD)
    tiles = launch.tiles("gate_up", x_nD)
    bound = (triton.cdiv(rows, tiles.m) + experts) * triton.cdiv(hidden, tiles.n)
    launch.run(
        gate_up_kernel, tiles, bound, x_nD, index_R, up_eID, offsets_e, pre_RI, h_RF, experts, rows, dim, hidden,
        step, *up_eID.stride(), UNIT=unit, KEEP=pre_RI is not None, EVEN=dim % tiles.k == 0 and hidden % tiles.n == 0,
        EXPERTS=segments_power(experts),
    )  # fmt: skip


def _epilogue(dh, w, pre, d_pre, hw, row, lane, here, column, hidden):  # type: ignore[no-untyped-def]
    """The activation's backward for a tile whose first column is `column`; returns sum(h * dh) over its columns.

    A few columns at a time: it holds several values for each of dh's, and more spill.
    """
    if dh.shape[1] > 16:
        left, right = halves(dh)
        dot = epilogue(left, w, pre, d_pre, hw, row, lane, here, column, hidden)
        dot += epilogue(right, w, pre, d_pre, hw, row, lane, here, column + left.shape[1], hidden)
    else:
        f = column + tl.arange(0, dh.shape[1])
        inside = here[:, None] & (f < hidden)[None, :]
        at = lane[:, None] * (2 * hidden) + f[None, :]
        pre += row * (2 * hidden)
        d_pre += row * (2 * hidden)
        gate = tl.load(pre + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(pre + at + hidden, mask=inside, other=0.0).to(tl.float32)
        slope = tl.sigmoid(gate)
        silu = gate * slope
        h = silu * value
        dot = tl.sum(h * dh, axis=1)
        hw += row * hidden
        tl.store(hw + (lane[:, None] * hidden + f[None, :]), (h * w[:, None]).to(hw.dtype.element_ty), mask=inside)
        dh *= w[:, None]
        tl.store(d_pre + at + hidden, (dh * silu).to(d_pre.dtype.element_ty), mask=inside)
        # The slope of silu is sigmoid + silu (1 - sigmoid).
        tl.store(d_pre + at, (dh * value * (slope + silu * (1 - slope))).to(d_pre.dtype.element_ty), mask=inside)
    return dot


epilogue = triton.jit(_epilogue)


def _hidden_grad(  # type: ignore[no-untyped-def]
    dy,  # [n, D]
    index,  # [R] int64
    down,  # [e, D, F]
    weight,  # [R] float32
    offsets,  # [e + 1] int64
    pre,  # [R, 2F]
    d_pre,  # [R, 2F]
    hw,  # [R, F]
    dots,  # [R, C] float32
    experts, rows, dim, hidden, down_e, down_d, down_f, EVEN: tl.constexpr, WIDE: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(hidden, BN)
    total = segment_tiles(offsets, experts, rows, False, EXPERTS, BM) * columns
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, column = tile_of(offsets, experts, rows, tile, columns, False, EXPERTS, BM)
        lane = tl.arange(0, BM)
        here = lane < (end - row).to(tl.int32)
        source = tl.load(index + row + lane, mask=here, other=-1)
        read = source >= 0
        f = column * BN + tl.arange(0, BN)
        dh = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(0, dim, BK):
            d = step + tl.arange(0, BK)
            dy_at = dy + source[:, None] * dim + d[None, :]
            down_at = down + expert * down_e + d[:, None] * down_d + f[None, :] * down_f
            left = of_rows(dy_at, read, d < dim, EVEN, WIDE)
            right = of_weight(down_at, d < dim, f < hidden, EVEN, WIDE)
            dh = tl.dot(left, right, dh, input_precision="ieee")
        w = tl.load(weight + row + lane, mask=here, other=0.0)
        dot = epilogue(dh, w, pre, d_pre, hw, row, lane, here, column * BN, hidden)
        tl.store(dots + (row + lane) * columns + column, dot, mask=here)


hidden_grad_kernel = kernel(_hidden_grad, "experts", "rows")


def hidden_grad(
    dy_nD: Tensor, index_R: Tensor, down_eDF: Tensor, weight_R: Tensor, offsets_e: Tensor, pre_RI: Tensor,
    launch: Launch,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_pre [R, 2F], hw [R, F], dots [R, C] float32). Rows behind the last segment are not written.

    Args:
        dy_nD: contiguous. index_R: int64 rows of dy, -1 for a row of zeros.
        down_eDF: any strides, dy's dtype.
        weight_R: float32 routing weights.
        offsets_e: [e + 1] int64. pre_RI: [R, 2F] contiguous, as the forward kept it.
    """
    (experts, dim, hidden), rows = down_eDF.shape, pre_RI.shape[0]
    tiles = launch.tiles("dh", dy_nD)
    columns = triton.cdiv(hidden, tiles.n)
    d_pre, hw = pre_RI.new_empty(rows, 2 * hidden), pre_RI.new_empty(rows, hidden)
    dots = weight_R.new_empty(rows, columns)
    bound = (triton.cdiv(rows, tiles.m) + experts) * columns
    launch.run(
        hidden_grad_kernel, tiles, bound, dy_nD, index_R, down_eDF, weight_R, offsets_e, pre_RI, d_pre, hw, dots,
        experts, rows, dim, hidden, *down_eDF.stride(), EVEN=dim % tiles.k == 0 and hidden % tiles.n == 0,
        EXPERTS=segments_power(experts),
    )  # fmt: skip
    return d_pre, hw, dots
