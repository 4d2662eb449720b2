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
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.experts.recipes.base import Operands, Quantized, Role
from trimtab.experts.recipes.numbers import E4M3
from trimtab.kernels.counted import count
from trimtab.layout import align_up

Packed = tuple[Tensor, Tensor]
"""Bytes of E4M3, and scales in the kernel's layout."""


class Engine:
    """One recipe's layout of scales, and its two multiplications. Reads nothing on the host."""

    alignment: int

    def installed(self) -> bool:
        """Whether what it needs beyond torch is there."""
        return True

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        """Rows [S, C] times weights [e, N, C]: [S, N], not set in the padding."""
        raise NotImplementedError

    def by_groups(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        """Columns [A, S] times columns [B, S], segment by segment: [e, A, B], not set for a segment without rows."""
        raise NotImplementedError

    def row_scales(self, q: Quantized) -> Tensor:
        """Of rows that are contracted along C."""
        return q.scale.contiguous()

    def weight_scales(self, q: Quantized, turned: bool) -> Tensor:
        """Of a weight [e, C, N]; where `turned` of [e, N, C]."""
        return (q.scale if turned else q.scale.mT).contiguous()

    def column_scales(self, q: Quantized, offsets_e: Tensor) -> Tensor:
        """Of rows [S, C] that are contracted along S."""
        return q.scale.contiguous()

    def product(
        self, call: Operands, rows_RC: Tensor, w_eAB: Tensor, offsets_e: Tensor, role: Role, along: Literal["in", "out"]
    ) -> Tensor:
        """Rows times w, contracted along "in", or times w^T, contracted along "out": [R, N], zero in the padding."""
        q = call.quantize(self._filled(rows_RC), offsets_e, role, "row")
        w, turned = call.quantize(w_eAB, None, "weight", along), along == "out"
        right = _stored(w.values if turned else w.values.mT), self.weight_scales(w, turned)
        y = self.by_rows((_stored(q.values), self.row_scales(q)), right, offsets_e)
        index_R = torch.arange(y.shape[0], device=y.device)
        return y.masked_fill_((index_R >= offsets_e[-1])[:, None], 0)[: rows_RC.shape[0]]

    def columns(self, call: Operands, rows_RC: Tensor, offsets_e: Tensor, role: Role) -> Packed:
        """An operand of `wgrad`, one byte per value: quantized now, multiplied whenever it is wanted."""
        q = call.quantize(self._filled(rows_RC), offsets_e, role, "column")
        return _stored(q.values.t()), self.column_scales(q, offsets_e)

    def wgrad(self, x: Packed, dy: Packed, offsets_e: Tensor) -> Tensor:
        """[e, A, B], zero for a segment without rows."""
        dw = self.by_groups(x, dy, offsets_e)
        empty_e = offsets_e[1:] == offsets_e[:-1]
        return dw.masked_fill_(empty_e[:, None, None], 0)

    def _filled(self, rows_RC: Tensor) -> Tensor:
        whole = max(align_up(rows_RC.shape[0], self.alignment), self.alignment)  # no kernel is called with no rows
        return pad(rows_RC, (0, 0, 0, whole - rows_RC.shape[0]))


def _stored(values: Tensor) -> Tensor:
    return values.to(E4M3.dtype).contiguous()


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
