"""What tensors may hold ids of experts."""

from __future__ import annotations

import torch
from torch import Tensor


def holds_ids(t: Tensor) -> bool:
    """Whether its dtype is one of integers."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
