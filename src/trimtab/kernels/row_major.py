"""Strides that the shape says, also where a tensor has no element."""

from __future__ import annotations

from torch import Tensor


def row_major(t: Tensor) -> Tensor:
    """`t.contiguous()` whose strides are those of its shape.

    A tensor without elements, and a dim of one, are contiguous with any strides: the gradient of a sum over no rows
    has strides of 0. Views in other dtypes and `torch.nn.functional.grouped_mm` refuse those.
    """
    t, strides, step = t.contiguous(), [0] * t.dim(), 1
    for dim in reversed(range(t.dim())):
        strides[dim], step = step, step * max(t.shape[dim], 1)
    return t if t.stride() == tuple(strides) else t.as_strided(t.shape, strides)
