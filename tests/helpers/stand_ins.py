"""What stands in for the kernels of a GPU: each checks its operands as the kernel does, and multiplies in float64.

Legend: S rows in segments, e experts, C the contracted width, N the output's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.recipes import MXFP8, FP8Rowwise
from trimtab.experts.recipes.base import Way
from trimtab.experts.recipes.hardware import Engine, MXFP8Engine, Packed, RowwiseEngine

FP8, BLOCK = torch.float8_e4m3fn, 128


def checked(*operands: Tensor, ends: Tensor, scales: torch.dtype) -> Tensor:
    """What both have in common: operands and scales as torch 2.13 checks them; the result before anything is in it.

    A private function of torch checks strides and scales once more, on the meta device.
    """
    on_meta = (t.to("meta") for t in operands)
    shape = torch._scaled_grouped_mm(*on_meta, offs=ends.to("meta"), out_dtype=torch.bfloat16).shape
    left, right, left_scale, right_scale = operands
    assert left.dtype == right.dtype == FP8
    assert left_scale.dtype == right_scale.dtype == scales
    assert (ends.dtype, ends.dim()) == (torch.int32, 1)
    assert left.is_contiguous()
    assert right.mT.is_contiguous()
    return torch.full(shape, torch.nan, dtype=torch.float64)


def rowwise_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """`torch.nn.functional.scaled_grouped_mm` with row-wise scales. NaN where there is no row."""
    out = checked(left, right, left_scale, right_scale, ends=ends, scales=torch.float32)
    assert left.shape[-1] % 16 == 0
    assert right.shape[-2] % 16 == right.shape[-1] % 16 == 0
    a, b, cuts = left.double(), right.double(), [0, *ends.tolist()]
    for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        s = slice(start, end)
        if right.dim() == 3:
            out[s] = (a[s] @ b[i]) * left_scale[s, None].double() * right_scale[i].double()
        elif end > start:
            scales = left_scale.view(len(ends), -1)[i, :, None], right_scale.view(len(ends), -1)[i]
            out[i] = (a[:, s] @ b[s]) * scales[0].double() * scales[1].double()
    return out.to(dtype)


def mxfp8_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """`torch.nn.functional.scaled_grouped_mm` with swizzled blocks of 32. NaN where there is no row."""
    out = checked(left, right, left_scale, right_scale, ends=ends, scales=torch.float8_e8m0fnu)
    a, b, cuts = left.double(), right.double(), [0, *ends.tolist()]
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


class Rowwise(RowwiseEngine):
    """dtype: of the products, bfloat16 on real hardware."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def product(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return rowwise_product(x[0], w[0].mT, x[1], w[1], offsets_e[1:].int(), dtype=self.dtype)


class MX(MXFP8Engine):
    """The same."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def product(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return mxfp8_product(x[0], w[0].mT, x[1], w[1], offsets_e[1:].int(), dtype=self.dtype)


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
class StandInMXFP8(OnHardware, MXFP8):
    dtype: torch.dtype = torch.float32

    def engine(self) -> Engine:
        return MX(self.dtype)


PAIRS = {
    "rowwise": (StandInRowwise, FP8Rowwise(backend="emulated")),
    "mxfp8": (StandInMXFP8, MXFP8(backend="emulated")),
}
