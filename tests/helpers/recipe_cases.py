"""The recipes under test, and operands in segments.

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.experts.recipes import MXFP8, NVFP4, FP8Blockwise, FP8Current, FP8Delayed, FP8Rowwise
from trimtab.experts.recipes.base import Recipe

RECIPES: dict[str, Recipe] = {
    "fp8_delayed": FP8Delayed(backend="emulated"),
    "fp8_delayed_e4m3": FP8Delayed(backend="emulated", hybrid=False, history=4, margin=11, algorithm="latest"),
    "fp8_current": FP8Current(backend="emulated"), "fp8_current_e4m3": FP8Current(backend="emulated", hybrid=False),
    "fp8_rowwise": FP8Rowwise(backend="emulated"),
    "fp8_rowwise_pow2": FP8Rowwise(backend="emulated", power_of_two=True),
    "fp8_blockwise": FP8Blockwise(backend="emulated"),
    "fp8_blockwise_fp32": FP8Blockwise(backend="emulated", power_of_two=False), "mxfp8": MXFP8(backend="emulated"),
    "mxfp8_ceil": MXFP8(backend="emulated", scale_rounding="ceil"),
    "mxfp8_hybrid": MXFP8(backend="emulated", hybrid=True), "nvfp4": NVFP4(backend="emulated", seed=7),
    "nvfp4_line": NVFP4(backend="emulated", square_weights=False),
    "nvfp4_nearest": NVFP4(backend="emulated", stochastic_gradients=False),
}  # fmt: skip
NAMES = list(RECIPES)
KINDS = ["fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]  # one of each
METHODS = [("activation", "row"), ("activation", "column"), ("gradient", "row"), ("gradient", "column")]
WEIGHTS = ("in", "out")


def offsets(recipe: Recipe, *units: int) -> Tensor:
    """[e + 1]: segments of so many times the alignment."""
    return torch.tensor((0, *units)).cumsum(0) * recipe.alignment


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(recipe: Recipe, x: Tensor, offsets_e: Tensor, method: tuple[str, str]) -> Tensor:
    """What a fresh state makes of the rows."""
    name, along = method
    torch.manual_seed(11)  # the key of a state that draws one
    out: Tensor = getattr(recipe.state(), name)(x, offsets_e, along=along)
    return out
