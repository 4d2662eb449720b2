"""What a recipe's operands are multiplied by on tensor cores, and how it wants their scales.

Tensor cores read FP8 with the contracted axis contiguous, on both sides: rows [S, C], weights [e, N, C], columns
[C, S], with S the rows filled up to a multiple of the alignment that is not zero. The results are bfloat16.

Legend: S rows, e experts, A in features, B out features, C either width, N the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.experts.recipes.numbers import E4M3, Encoded
from trimtab.kernels.tensor_checks import count

Packed = tuple[Tensor, Tensor]
"""Bytes of E4M3, and scales in the kernel's layout."""


class Engine:
    """One recipe's layout of scales for `torch.nn.functional.scaled_grouped_mm`, which takes both of its products.

    Reads nothing on the host. scaling: a name in `torch.nn.functional.ScalingType`. options: more of its arguments.
    alignment: of segments. capability: the lowest that has it; only later minor versions of the same major have it too.
    multiple: that widths are multiples of.
    """

    scaling: str
    options: Mapping[str, Any]
    alignment: int
    capability: tuple[int, int]
    multiple: int

    def lacks(self, device: torch.device, in_features: int, out_features: int) -> str:
        """What it needs and what is here, "" where it runs. For a layer on the meta device, which will be materialized,
        the current CUDA device answers."""
        found = None
        if device.type in ("cuda", "meta") and torch.cuda.is_available():
            found = torch.cuda.get_device_capability(device if device.type == "cuda" else None)
        at_least = found is not None and found[0] == self.capability[0] and found >= self.capability
        if at_least and in_features % self.multiple == out_features % self.multiple == 0:
            return ""
        has = "no CUDA device" if found is None else "compute capability {}.{}".format(*found)
        wanted = "{}.{} or later of {}.x".format(*self.capability, self.capability[0])
        return (
            f"it needs scaled_grouped_mm with {self.scaling} scales, compute capability {wanted} and widths of "
            f"multiples of {self.multiple}. Here are torch {torch.__version__}, device {device} with {has}, widths "
            f"{in_features} and {out_features}"
        )

    def product(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        """Rows [S, C] times weights [e, N, C]: [S, N], not set in the padding. Columns [A, S] times columns [B, S],
        segment by segment: [e, A, B], not set for a segment without rows."""
        kind = getattr(torch.nn.functional.ScalingType, self.scaling)
        count(x[0].shape[0], x[0].shape[1], w[0].shape[-2])
        y: Tensor = torch.nn.functional.scaled_grouped_mm(  # type: ignore[attr-defined]
            x[0], w[0].mT, x[1], kind, w[1], kind, offs=offsets_e[1:].int(), output_dtype=torch.bfloat16, **self.options
        )
        return y

    def row_scales(self, q: Encoded) -> Tensor:
        """Of rows that are contracted along C."""
        raise NotImplementedError

    def weight_scales(self, q: Encoded, turned: bool) -> Tensor:
        """Of a weight [e, C, N]; where `turned` of [e, N, C]."""
        raise NotImplementedError

    def column_scales(self, q: Encoded, offsets_e: Tensor) -> Tensor:
        """Of rows [S, C] that are contracted along S."""
        raise NotImplementedError

    def rows(self, x: Encoded, w: Encoded, turned: bool, offsets_e: Tensor) -> Tensor:
        """Rows [S, C] times w [e, C, N], or, where `turned`, w^T of [e, N, C]: [S, N], zero in the padding."""
        right = _stored(w.values if turned else w.values.mT), self.weight_scales(w, turned)
        y = self.product((_stored(x.values), self.row_scales(x)), right, offsets_e)
        index_S = torch.arange(y.shape[0], device=y.device)
        return y.masked_fill_((index_S >= offsets_e[-1])[:, None], 0)

    def columns(self, rows: Encoded, offsets_e: Tensor) -> Packed:
        """An operand of `wgrad`, one byte per value."""
        return _stored(rows.values.t()), self.column_scales(rows, offsets_e)

    def wgrad(self, x: Packed, dy: Packed, offsets_e: Tensor) -> Tensor:
        """[e, A, B], zero for a segment without rows."""
        empty_e = offsets_e[1:] == offsets_e[:-1]
        return self.product(x, dy, offsets_e).masked_fill_(empty_e[:, None, None], 0)


class RowwiseEngine(Engine):
    """Hopper: scales [S] of rows, [e, N] of weights, [e * C] of columns."""

    scaling, alignment, capability, multiple = "RowWise", 16, (9, 0), 16
    options: Mapping[str, Any] = {"use_fast_accum": False}  # sums in float32 throughout

    def row_scales(self, q: Encoded) -> Tensor:
        return q.scale[:, 0].contiguous()

    def weight_scales(self, q: Encoded, turned: bool) -> Tensor:
        return q.scale.squeeze(2 if turned else 1).contiguous()

    def column_scales(self, q: Encoded, offsets_e: Tensor) -> Tensor:
        return q.scale.reshape(-1)


class MXFP8Engine(Engine):
    """Blackwell. Scales of 128 vectors x 4 blocks are one tile of 512 bytes, vector v, block b of a tile at byte
    16 (v % 32) + 4 (v // 32) + b (cuBLAS, "1D block scaling factors layout").

    Tiles of rows lie one segment after the other, those of columns as well: a tile belongs to one segment.
    """

    scaling, alignment, capability, multiple = "BlockWise1x32", 128, (10, 0), 32

    def __init__(self) -> None:
        swizzle = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
        self.options = {"swizzle_a": swizzle, "swizzle_b": swizzle}

    def row_scales(self, q: Encoded) -> Tensor:
        made = _tiles(q.scale)
        return made.reshape(made.shape[0] * 128, -1)

    def weight_scales(self, q: Encoded, turned: bool) -> Tensor:
        return _tiles(q.scale if turned else q.scale.mT).flatten(1)

    def column_scales(self, q: Encoded, offsets_e: Tensor) -> Tensor:
        made = _tiles(q.scale.t())
        return _by_segment(made, offsets_e.long() // 128).view(made.shape[0] * 128, -1)


def _stored(values: Tensor) -> Tensor:
    return values.to(E4M3.dtype).contiguous()


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
