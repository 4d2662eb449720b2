"""gpt-oss's limit on pre-activations, the same with every torch."""

from __future__ import annotations

import math

from torch import Tensor


def cut(x: Tensor, high: float, low: float = -math.inf) -> Tensor:
    """As `clamp`; what lies at a limit has a slope, which that of torch 2.15 and newer no longer gives it."""
    return x.masked_fill(x > high, high).masked_fill(x < low, low)
