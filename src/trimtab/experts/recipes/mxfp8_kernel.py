"""MXFP8 through `torch.nn.functional.scaled_grouped_mm`, on Blackwell.

The kernel reads scales of 128 vectors x 4 blocks as one tile of 512 bytes, in the order in which tensor cores take
them: vector v, block b of a tile at byte 16 (v % 32) + 4 (v // 32) + b (cuBLAS, "1D block scaling factors layout").

    rows       tiles [S / 128, C / 128], segments at multiples of 128: the tiles of all segments, one after the other
    weights    tiles [N / 128, C / 128] of each expert
    columns    tiles [C / 128, s / 128] of each segment of s rows, one segment after the other

Legend: S expert rows, e experts, C either width, N the other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.experts.recipes.engine import RawCall, TorchKernel
from trimtab.experts.recipes.quantised import Quantised
from trimtab.kernels.counted import count

VECTORS, BLOCKS = 128, 4


def scaled_grouped_mm(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends_e: Tensor) -> Tensor:
    """torch's grouped product with blocks of 32: bfloat16."""
    count(left.shape[0], left.shape[1], right.shape[-1])
    blocks = torch.nn.functional.ScalingType.BlockWise1x32
    swizzle = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
    y: Tensor = torch.nn.functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        left,
        right,
        left_scale,
        blocks,
        right_scale,
        blocks,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        offs=ends_e,
        output_dtype=torch.bfloat16,
    )
    return y


def tiles(scale: Tensor) -> Tensor:
    """Scales [..., v, b] as tiles [..., v / 128, b / 4, 512] in E8M0, filled up to whole ones."""
    v, b = scale.shape[-2:]
    whole = pad(scale, (0, -b % BLOCKS, 0, -v % VECTORS), value=1.0)
    n, m = whole.shape[-2] // VECTORS, whole.shape[-1] // BLOCKS
    cut = whole.view(*scale.shape[:-2], n, 4, 32, m, BLOCKS)
    return cut.movedim(-2, -4).transpose(-3, -2).flatten(-3).to(torch.float8_e8m0fnu)


def by_segment(tiles_nm: Tensor, cuts_e: Tensor) -> Tensor:
    """Tiles [n, m, 512] whose columns are cut at `cuts_e` [e + 1], in the order (segment, row, column): flat.

    What lies behind the last cut is one more segment.
    """
    n, m, _ = tiles_nm.shape
    column_m = torch.arange(m, device=cuts_e.device)
    ends = torch.cat((cuts_e, cuts_e.new_full((1,), m)))
    segment_m = torch.searchsorted(ends[1:], column_m, right=True)
    first_m, width_m = ends[segment_m], (ends[1:] - ends[:-1])[segment_m]
    row_n1 = torch.arange(n, device=cuts_e.device)[:, None]
    place_nm = n * first_m + row_n1 * width_m + (column_m - first_m)
    bytes_nm = tiles_nm.view(torch.uint8).flatten(0, 1)
    moved = torch.empty_like(bytes_nm).index_copy_(0, place_nm.flatten(), bytes_nm)
    return moved.view(torch.float8_e8m0fnu).flatten()


class MXFP8Kernel(TorchKernel):
    """See `engine.Kernel`.

    Args:
        call: what multiplies, given as (left [S, C], right [e, C, N], scales [S, c] and [e, n * c], ends [e]) or, for
            the weight gradient, (left [A, S], right [S, B], scales [a, s] and [b, s], ends [e]); c and s count blocks
            of 32 and a, b and n vectors, filled up to tiles.
    """

    alignment = 128  # a tile of scales belongs to one segment

    def __init__(self, call: RawCall = scaled_grouped_mm) -> None:
        super().__init__(call)

    def rows(self, quantised: Quantised) -> Tensor:
        made = tiles(quantised.scale)
        return made.reshape(made.shape[0] * VECTORS, -1)

    def weight(self, quantised: Quantised, transpose: bool) -> Tensor:
        return tiles(quantised.scale if transpose else quantised.scale.mT).flatten(1)

    def columns(self, quantised: Quantised, offsets_e: Tensor) -> Tensor:
        made = tiles(quantised.scale.t())
        return by_segment(made, offsets_e.long() // VECTORS).view(made.shape[0] * VECTORS, -1)
