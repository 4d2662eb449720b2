"""Group sizes, wherever they live, to the offsets of segments.

Legend: e groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.layout import segment_offsets
from trimtab.operators import operator
from trimtab.validation import assert_on_device, is_whole

GroupSizes = Iterable[SupportsIndex] | Tensor


def offsets_of(group_sizes: GroupSizes, num_groups: int, rows: int, device: torch.device) -> Tensor:
    """[e + 1] int64 on `device`: the start of each group's segment, and the end of the last.

    Sizes on the host are checked. Those on `device` are never read by the host; wrong ones trip an assertion there.

    Args:
        group_sizes: list or NumPy array, CPU tensor or tensor on `device`, `num_groups` of them; tensors of int32 or
            int64.
        rows: how many rows there are; the sizes may sum to fewer.

    Raises:
        InputError: wrong length, dtype or device; on the host also a negative size or a sum beyond the rows.
    """
    if not isinstance(group_sizes, Tensor):
        try:
            sizes = list(group_sizes)
        except TypeError:
            raise _bad(f"must be a list, array or tensor of ints, got {group_sizes!r}") from None
        wrong = [size for size in sizes if isinstance(size, Tensor) or not is_whole(size)]
        if wrong:
            raise _bad(f"must hold ints, found {wrong[0]!r}")
        group_sizes = torch.tensor([index(size) for size in sizes], dtype=torch.int64, device="cpu")
    if group_sizes.dtype not in (torch.int32, torch.int64):
        raise _bad(f"must be int32 or int64, got {group_sizes.dtype}")
    if group_sizes.ndim != 1:
        raise _bad(f"must be one-dimensional, got the shape {tuple(group_sizes.shape)}")
    if group_sizes.device.type != "cpu" and group_sizes.device != device:
        raise _bad(f"are on {group_sizes.device} and the rows on {device}: put them on the CPU or on {device}")
    if group_sizes.shape[0] != num_groups:
        raise _bad(f"have {group_sizes.shape[0]} entries for {num_groups} groups")
    offsets_e: Tensor = group_offsets_op(group_sizes, rows)
    return offsets_e.to(device, non_blocking=True)


def _offsets(sizes_e: Tensor, rows: int) -> Tensor:
    if sizes_e.device.type != "cpu":
        return _on_device(sizes_e, rows)
    sizes = sizes_e.tolist()
    negative = [i for i, size in enumerate(sizes) if size < 0]
    if negative:
        raise _bad(f"must not be negative, but group {negative[0]} has {sizes[negative[0]]}")
    offsets = segment_offsets(sizes)
    if offsets[-1] > rows:
        raise _bad(f"sum to {offsets[-1]}, but there are only {rows} rows")
    return torch.tensor(offsets, dtype=torch.int64, device="cpu")


def _on_device(sizes_e: Tensor, rows: int) -> Tensor:
    offsets_e = torch.nn.functional.pad(sizes_e.cumsum(0, dtype=torch.int64), (1, 0))
    legal = (sizes_e >= 0).all() & (offsets_e[-1] <= rows)
    assert_on_device(legal, "group_sizes are negative or sum to more than there are rows")
    return offsets_e


def _bad(what: str) -> InputError:
    return InputError(f"group_sizes {what}", phase="experts")


group_offsets_op = operator(
    "group_offsets(Tensor sizes, SymInt rows) -> Tensor",
    _offsets,
    lambda sizes, rows: sizes.new_empty(sizes.shape[0] + 1, dtype=torch.int64),
)
"""[e + 1] int64 on the sizes' device, checked against the number of rows."""
