"""Several tensors in one row: what belongs to a token travels together, as bytes, in one collective.

    [ tokens D x dtype | weights K x float32 | ids K x int32 ]      each part starts at a multiple of 8 bytes

Legend: n rows, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.layout import align_up

PART_ALIGNMENT = 8


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [n, *] of any dtypes as one [n, B] uint8. A single one is not copied if it is contiguous."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(torch.uint8)
    widths = [align_up(t.shape[1] * t.element_size(), PART_ALIGNMENT) for t in tensors]
    packed = torch.empty(tensors[0].shape[0], sum(widths), dtype=torch.uint8, device=tensors[0].device)
    for part, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        part.copy_(tensor)
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of [n, B] as views [n, *] with the widths and dtypes of `like` (whose own n may differ)."""
    parts, start = [], 0
    for tensor in like:
        size = tensor.shape[1] * tensor.element_size()
        parts.append(packed[:, start : start + size].view(tensor.dtype))
        start += align_up(size, PART_ALIGNMENT)
    return parts
