"""The first grouped GEMM of a SwiGLU expert: rows gathered on load, the activation in the epilogue.

    pre = x[index] @ up^T           [gate | up], kept for the backward, rounded as stored
    h   = silu(gate) * up           of the rounded values: what the backward will see

Legend: R rows of all segments, n rows of x, e experts, D contracted width, F hidden dim.
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


def _gate_up(  # type: ignore[no-untyped-def]
    x,  # [n, D]
    index,  # [R] int64
    up,  # [e, 2F, D]
    offsets,  # [e + 1] int64
    pre,  # [R, 2F], only with KEEP
    h,  # [R, F]
    experts,
    rows,
    dim,
    hidden,
    up_e,
    up_i,
    up_d,
    KEEP: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
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
            x_at = x + source[:, None] * dim + d[None, :]
            gate_at = up + expert * up_e + d[:, None] * up_d + f[None, :] * up_i
            if EVEN:
                left = tl.load(x_at, mask=read[:, None], other=0.0)
                right = tl.load(gate_at)
                other = tl.load(gate_at + hidden * up_i)
            else:
                inside = (d < dim)[:, None] & (f < hidden)[None, :]
                left = tl.load(x_at, mask=read[:, None] & (d < dim)[None, :], other=0.0)
                right = tl.load(gate_at, mask=inside, other=0.0)
                other = tl.load(gate_at + hidden * up_i, mask=inside, other=0.0)
            if WIDE:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
                other = other.to(tl.float32)
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
    x_nD: Tensor,
    index_R: Tensor,
    up_eID: Tensor,
    offsets_e: Tensor,
    pre_RI: Tensor | None,
    h_RF: Tensor,
    launch: Launch,
) -> None:
    """Into `pre_RI` [R, 2F], if there is one, and `h_RF`, both contiguous; rows behind the last segment are left.

    Args:
        x_nD: contiguous. index_R: int64 rows of x, -1 for a row of zeros.
        up_eID: [e, 2F, D], gate first, any strides, x's dtype.
        offsets_e: [e + 1] int64.
    """
    (experts, _, dim), (rows, hidden) = up_eID.shape, h_RF.shape
    tiles = launch.tiles(launch.gate_up, x_nD.dtype)
    bound = (triton.cdiv(rows, tiles.m) + experts) * triton.cdiv(hidden, tiles.n)
    with on_device_of(x_nD):
        gate_up_kernel[launch.grid(x_nD.device, tiles, bound)](
            x_nD, index_R, up_eID, offsets_e, pre_RI, h_RF, experts, rows, dim, hidden, *up_eID.stride(),
            KEEP=pre_RI is not None, EVEN=dim % tiles.k == 0 and hidden % tiles.n == 0, WIDE=launch.wide,
            EXPERTS=segments_power(experts), **tiles.options(),
        )  # fmt: skip
