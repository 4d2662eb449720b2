"""The three products on tensor cores: quantize, lay out as the kernel reads, multiply the bytes.

    forward   y[segment i]  = x[segment i] @ w[i]              x by rows        w contracted along in
    dgrad     dx[segment i] = dy[segment i] @ w[i]^T           dy by rows       w contracted along out
    wgrad     dw[i]         = x[segment i]^T @ dy[segment i]   x by columns     dy by columns

Tensor cores read FP8 with the contracted axis contiguous, on both sides: rows [S, C], weights [e, N, C], columns
[C, S], with S the rows filled up to a multiple of the alignment that is not zero. The results are bfloat16.

Legend: R expert rows, S the same filled up, e experts, A in features, B out features, C either width, N the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.experts.recipes.base import Engine, Packed, Quantized
from trimtab.kernels.memory import count


class TorchEngine(Engine):
    """`torch.nn.functional.scaled_grouped_mm`: it takes both products, and the ends [e].

    scaling: a name in `torch.nn.functional.ScalingType`. options: more of its arguments.
    """

    scaling: str
    options: Mapping[str, Any]

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        kind = getattr(torch.nn.functional.ScalingType, self.scaling)
        count(x[0].shape[0], x[0].shape[1], w[0].shape[-2])
        y: Tensor = torch.nn.functional.scaled_grouped_mm(  # type: ignore[attr-defined]
            x[0], w[0].mT, x[1], kind, w[1], kind, offs=offsets_e[1:].int(), output_dtype=torch.bfloat16,
            **self.options,
        )  # fmt: skip
        return y

    by_groups = by_rows


class RowwiseEngine(TorchEngine):
    """Hopper: scales [S] of rows, [e, N] of weights, [e * C] of columns."""

    alignment, scaling = 16, "RowWise"
    options: Mapping[str, Any] = {"use_fast_accum": False}  # sums in float32 throughout

    def row_scales(self, q: Quantized) -> Tensor:
        return q.scale[:, 0].contiguous()

    def weight_scales(self, q: Quantized, turned: bool) -> Tensor:
        return q.scale.squeeze(2 if turned else 1).contiguous()

    def column_scales(self, q: Quantized, offsets_e: Tensor) -> Tensor:
        return q.scale.reshape(-1)


class BlockwiseEngine(Engine):
    """Hopper, by Triton kernels of our own: torch has no grouped call of it."""

    alignment = 128

    def installed(self) -> bool:
        return find_spec("triton") is not None

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        from trimtab.kernels.fp8_blockwise import blockwise_rows  # needs Triton, which not every machine has

        return blockwise_rows(*x, *w, offsets_e.long())

    def by_groups(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        from trimtab.kernels.fp8_blockwise import blockwise_groups

        return blockwise_groups(*x, *w, offsets_e.long())


class MXFP8Engine(TorchEngine):
    """Blackwell. Scales of 128 vectors x 4 blocks are one tile of 512 bytes, vector v, block b of a tile at byte
    16 (v % 32) + 4 (v // 32) + b (cuBLAS, "1D block scaling factors layout").

    Tiles of rows lie one segment after the other, those of columns as well: a tile belongs to one segment.
    """

    alignment, scaling = 128, "BlockWise1x32"

    def __init__(self) -> None:
        swizzle = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
        self.options = {"swizzle_a": swizzle, "swizzle_b": swizzle}

    def row_scales(self, q: Quantized) -> Tensor:
        made = _tiles(q.scale)
        return made.reshape(made.shape[0] * 128, -1)

    def weight_scales(self, q: Quantized, turned: bool) -> Tensor:
        return _tiles(q.scale if turned else q.scale.mT).flatten(1)

    def column_scales(self, q: Quantized, offsets_e: Tensor) -> Tensor:
        made = _tiles(q.scale.t())
        return _by_segment(made, offsets_e.long() // 128).view(made.shape[0] * 128, -1)


def _tiles(scale: Tensor) -> Tensor:
    """Scales [..., v, b] as tiles [..., v / 128, b / 4, 512] in E8M0, filled up to whole ones."""
    v, b = scale.shape[-2:]
    whole = pad(scale, (0, -b % 4, 0, -v % 128), value=1.0)
    cut = whole.view(*scale.shape[:-2], whole.shape[-2] // 128, 4, 32, whole.shape[-1] // 4, 4)
    return cut.movedim(-2, -4).transpose(-3, -2).flatten(-3).to(torch.float8_e8m0fnu)


def _by_segment(tiles_nm: Tensor, cuts_e: Tensor) -> Tensor:
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
