"""What tensors may hold ids of experts."""

from __future__ import annotations

import torch
from torch import Tensor


def holds_ids(t: Tensor) -> bool:
    """Whether its dtype is one of integers."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def wide_ids(ids: Tensor) -> Tensor:
    """`ids` as integers that compare with any number of experts: int32 and int64 are, others become int64. What uint64
    alone holds becomes negative, and is no expert either."""
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.long()
