"""What stands in for the kernels of a GPU: each checks its operands as the kernel does, and multiplies in float64.

Legend: S rows in segments, e experts, C the contracted width, N, A and B output widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.recipes import MXFP8, FP8Blockwise, FP8Rowwise
from trimtab.experts.recipes.base import Way
from trimtab.experts.recipes.hardware import BlockwiseEngine, Engine, MXFP8Engine, Packed, RowwiseEngine

FP8, BLOCK = torch.float8_e4m3fn, 128


def rowwise_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """`torch.nn.functional.scaled_grouped_mm` with row-wise scales, as torch 2.13 checks it. NaN where there is no row.

    A private function of torch checks strides and scales once more, on the meta device.
    """
    on_meta = (t.to("meta") for t in (left, right, left_scale, right_scale))
    shape = torch._scaled_grouped_mm(*on_meta, offs=ends.to("meta"), out_dtype=torch.bfloat16).shape
    assert left.dtype == right.dtype == FP8
    assert left_scale.dtype == right_scale.dtype == torch.float32
    assert (ends.dtype, ends.dim()) == (torch.int32, 1)
    assert left.is_contiguous()
    assert right.mT.is_contiguous()
    assert left.shape[-1] % 16 == 0
    assert right.shape[-2] % 16 == right.shape[-1] % 16 == 0
    out = torch.full(shape, torch.nan, dtype=torch.float64)
    a, b, cuts = left.double(), right.double(), [0, *ends.tolist()]
    for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        s = slice(start, end)
        if right.dim() == 3:
            out[s] = (a[s] @ b[i]) * left_scale[s, None].double() * right_scale[i].double()
        elif end > start:
            scales = left_scale.view(len(ends), -1)[i, :, None], right_scale.view(len(ends), -1)[i]
            out[i] = (a[:, s] @ b[s]) * scales[0].double() * scales[1].double()
    return out.to(dtype)


def blockwise_rows(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """`trimtab.kernels.fp8_blockwise.blockwise_rows`: NaN behind the last segment."""
    (rows, c), (experts, n, _) = x.shape, w.shape
    _checked(x, w, x_scale, w_scale, offsets)
    assert x_scale.shape == (rows, c // BLOCK)
    assert w_scale.shape == (experts, n // BLOCK, c // BLOCK)
    out, cuts = torch.full((rows, n), torch.nan, dtype=torch.float64), offsets.tolist()
    a = x.double() * x_scale.double().repeat_interleave(BLOCK, 1)
    b = w.double() * w_scale.double().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        out[start:end] = a[start:end] @ b[i].t()
    return out.to(dtype)


def blockwise_groups(
    x: Tensor, x_scale: Tensor, dy: Tensor, dy_scale: Tensor, offsets: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """`trimtab.kernels.fp8_blockwise.blockwise_groups`."""
    (a_width, rows), b_width = x.shape, dy.shape[0]
    _checked(x, dy, x_scale, dy_scale, offsets)
    assert x_scale.shape == (rows // BLOCK, a_width)
    assert dy_scale.shape == (rows // BLOCK, b_width)
    a, b = (t.double() * s.double().repeat_interleave(BLOCK, 0).t() for t, s in ((x, x_scale), (dy, dy_scale)))
    cuts = offsets.tolist()
    return torch.stack([a[:, i:j] @ b[:, i:j].t() for i, j in zip(cuts, cuts[1:], strict=False)]).to(dtype)


def mxfp8_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """`torch.nn.functional.scaled_grouped_mm` with swizzled blocks of 32. NaN where there is no row."""
    on_meta = (t.to("meta") for t in (left, right, left_scale, right_scale))
    shape = torch._scaled_grouped_mm(*on_meta, offs=ends.to("meta"), out_dtype=torch.bfloat16).shape
    assert left.dtype == right.dtype == FP8
    assert left_scale.dtype == right_scale.dtype == torch.float8_e8m0fnu
    assert left.is_contiguous()
    assert right.mT.is_contiguous()
    out, cuts = torch.full(shape, torch.nan, dtype=torch.float64), [0, *ends.tolist()]
    a, b = left.double(), right.double()
    for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        s = slice(start, end)
        if right.dim() == 3:
            per_row = left_scale.numel() // left.shape[0]
            left_part = left_scale.flatten()[start * per_row : end * per_row]
            left_factor = unswizzled(left_part, end - start, left.shape[1])
            right_factor = unswizzled(right_scale[i], right.shape[2], right.shape[1])
            out[s] = (a[s] * left_factor) @ (b[i] * right_factor.t())
        else:
            factors = []
            for scale, vectors in ((left_scale, left.shape[0]), (right_scale, right.shape[1])):
                per_block = -(-vectors // BLOCK) * BLOCK
                part = scale.flatten()[start // 32 * per_block : end // 32 * per_block]
                factors.append(unswizzled(part, vectors, end - start))
            if end > start:
                out[i] = (a[:, s] * factors[0]) @ (b[s] * factors[1].t())
    return out.to(dtype)


def unswizzled(scale: Tensor, vectors: int, length: int) -> Tensor:
    """The factor of each value of `vectors` x `length` from the bytes of its tiles, by the formula, one by one."""
    across = -(-length // BLOCK)  # tiles of 4 blocks of 32
    v, b = torch.arange(vectors)[:, None], (torch.arange(length) // 32)[None, :]
    tile = (v // BLOCK) * across + b // 4
    return scale.double()[tile * 512 + (v % 32) * 16 + (v % BLOCK) // 32 * 4 + b % 4]


def _checked(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor) -> None:
    assert left.dtype == right.dtype == FP8
    assert left_scale.dtype == right_scale.dtype == torch.float32
    assert offsets.dtype == torch.int64
    assert all(t.is_contiguous() for t in (left, right, left_scale, right_scale, offsets))
    assert all(size % BLOCK == 0 for size in (*left.shape, *right.shape[-2:]))
    assert not (offsets % BLOCK).any()


class Rowwise(RowwiseEngine):
    """dtype: of the products, bfloat16 on real hardware."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return rowwise_product(x[0], w[0].mT, x[1], w[1], offsets_e[1:].int(), dtype=self.dtype)

    by_groups = by_rows


class Blockwise(BlockwiseEngine):
    """The same."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return blockwise_rows(*x, *w, offsets_e, dtype=self.dtype)

    def by_groups(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return blockwise_groups(*x, *w, offsets_e, dtype=self.dtype)


class MX(MXFP8Engine):
    """The same."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return mxfp8_product(x[0], w[0].mT, x[1], w[1], offsets_e[1:].int(), dtype=self.dtype)

    by_groups = by_rows


class OnHardware:
    """Runs on the CPU as on hardware."""

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        return "hardware"


@dataclass(frozen=True, kw_only=True)
class StandInRowwise(OnHardware, FP8Rowwise):
    dtype: torch.dtype = torch.float32

    def engine(self) -> Engine:
        return Rowwise(self.dtype)


@dataclass(frozen=True, kw_only=True)
class StandInBlockwise(OnHardware, FP8Blockwise):
    dtype: torch.dtype = torch.float32

    def engine(self) -> Engine:
        return Blockwise(self.dtype)


@dataclass(frozen=True, kw_only=True)
class StandInMXFP8(OnHardware, MXFP8):
    dtype: torch.dtype = torch.float32

    def engine(self) -> Engine:
        return MX(self.dtype)


PAIRS = {
    "rowwise": (StandInRowwise, FP8Rowwise(backend="emulated")),
    "blockwise": (StandInBlockwise, FP8Blockwise(backend="emulated")),
    "mxfp8": (StandInMXFP8, MXFP8(backend="emulated")),
}
