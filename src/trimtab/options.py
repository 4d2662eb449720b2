"""What options are checked by, where they are handed in: whole numbers, finite ones, dtypes that hold values."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from trimtab.errors import ConfigError


def is_whole(value: Any) -> bool:
    """Whether it stands for an integer, as NumPy's do; True and False do not."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number, neither NaN nor infinite."""
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def holds_values(dtype: Any) -> bool:
    """Whether it is a dtype of numbers that are computed with: floating, and none of 8 bits, which hold codes."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


VALUES = "float64, float32, bfloat16 or float16"
"""The dtypes that hold values, for messages."""


def check_sizes(least: int = 1, **sizes: Any) -> None:
    """Raises:
    ConfigError: one of the sizes is not a whole number, or less than `least`.
    """
    for name, size in sizes.items():
        if not is_whole(size) or size < least:
            raise ConfigError(f"{name}={size!r} must be a whole number, at least {least}")


def check_dtype(dtype: Any) -> None:
    """Raises:
    ConfigError: parameters cannot be of it; None is the default one.
    """
    if dtype is not None and not holds_values(dtype):
        raise ConfigError(f"dtype={dtype!r} is none of parameters: {VALUES} of torch")
