"""Checks of options, where they are handed in: flags, whole numbers, finite ones, dtypes that hold values."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import ConfigError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that hold values."""
VALUES = "float64, float32, bfloat16 or float16"
"""The same in words."""


def is_whole(value: Any) -> bool:
    """True for what stands for an integer, as NumPy's do; not for True and False."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """True for a number that is neither NaN nor infinite."""
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def holds_values(dtype: Any) -> bool:
    """True for a dtype of numbers that are computed with: floating, of more than 8 bits."""
    return isinstance(dtype, torch.dtype) and dtype in DTYPES


def check_sizes(least: int = 1, **sizes: Any) -> None:
    """Raises ConfigError: one of the sizes is not a whole number, or less than `least`."""
    for name, size in sizes.items():
        if not is_whole(size) or size < least:
            raise ConfigError(f"{name}={size!r} must be a whole number, at least {least}")


def assert_on_device(holds: Tensor, what: str) -> None:
    """On a device, without a sync: what runs there later fails where `holds` is False, saying what."""
    torch._assert_async(holds, f"trimtab: {what}")


def check_flags(**flags: Any) -> None:
    """Raises ConfigError: one of the flags is neither True nor False, NumPy's or Python's."""
    for name, flag in flags.items():
        if not isinstance(flag, bool) and (str(getattr(flag, "dtype", "")) != "bool" or flag.ndim):
            raise ConfigError(f"{name}={flag!r} must be True or False")


def check_dtype(dtype: Any) -> None:
    """Raises ConfigError: parameters cannot be of it; None is the default one."""
    if dtype is not None and not holds_values(dtype):
        raise ConfigError(f"dtype={dtype!r} is none of parameters: {VALUES} of torch")


def holds_ids(t: Tensor) -> bool:
    """True for a tensor of integers."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def wide_ids(ids: Tensor) -> Tensor:
    """`ids` as integers that compare with any number of experts: int32 and int64 are, others become int64. What uint64
    alone holds becomes negative, and is no expert either."""
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.long()
