"""The compiled kernels with their bfloat16 instructions, by emulated.h or the machine's, in memory all of NaN."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trimtab.errors import BackendError
from trimtab.kernels.bf16 import PRODUCTS
from trimtab.kernels.buffer_pool import HostBufferPool
from trimtab.kernels.compiled import CompiledKernels, compiled_kernels

INSTRUCTIONS = PRODUCTS[1:]
INSTEAD = Path(__file__).with_suffix(".h")
DEFINES = (
    f'TRIMTAB_EMULATE_BF16="{INSTEAD}"',
    f"EMULATED_{hashlib.sha256(INSTEAD.read_bytes()).hexdigest()}",  # another one is compiled anew
)
NANS = 0x7FC07FC0
MARGIN = 64


class PoisonedPool(HostBufferPool):
    """Fresh memory as NaN, read as floats or as pairs of bfloat16."""

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return poisoned(*shape, dtype=dtype)

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.empty(*like.shape, dtype=dtype or like.dtype)


def emulated(products: str | None = None, *, poison: bool = True) -> CompiledKernels:
    """Any machine's, compiled once and kept like the others. `products` alone, or the fastest.

    Without AVX-512 compilers take many minutes to make what is as wide as this: the machine's own kernels stand in for
    products that need no instructions, and tests of the others are skipped.
    """
    wide = compiled_kernels().instructions == "AVX-512"
    if not wide and products != "widened":
        pytest.skip("without AVX-512 a compiler takes too long for what emulates bfloat16's instructions")
    kernels = CompiledKernels(products=products, defines=DEFINES if wide else ())
    return _poisoned(kernels) if poison else kernels


def own(products: str) -> CompiledKernels:
    """This machine's. Skips the test where it has no such `products`."""
    try:
        return _poisoned(CompiledKernels(products=products))
    except BackendError as error:
        pytest.skip(str(error))


def _poisoned(kernels: CompiledKernels) -> CompiledKernels:
    kernels.pool = PoisonedPool()
    return kernels


def poisoned(*shape: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """NaN, and so are `MARGIN` values and `offset` more before it, and `MARGIN` behind it."""
    count, start = math.prod(shape), MARGIN + offset
    words = torch.full((-(-(start + count + MARGIN) * dtype.itemsize // 4),), NANS, dtype=torch.int32)
    return words.view(dtype)[start : start + count].view(shape)


def fenced(values: Tensor, offset: int = 0) -> Tensor:
    """A copy with NaN before and behind it, `offset` values from where a line of the cache begins."""
    return poisoned(*values.shape, dtype=values.dtype, offset=offset).copy_(values)


def fences(values: Tensor) -> Tensor:
    """What lies before and behind, of a `fenced` tensor."""
    whole = values.untyped_storage()
    flat = torch.empty(0, dtype=values.dtype).set_(whole)
    start = values.storage_offset()
    return torch.cat((flat[:start], flat[start + values.numel() :]))
