"""Base of the transports over a process group: a guard around collectives, and rows as bytes.

What belongs to a token travels together, packed as bytes of one row:

    [ tokens D x dtype | weights K x float32 | ids K x int32 ]      each part starts at a multiple of 8 bytes

Legend: n rows, T local tokens, P ranks, C columns of the message, M rows sent, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import InputError
from trimtab.guard.guard import Guard, SharedWhenCopied
from trimtab.guard.peers import Arrival, has_gloo
from trimtab.kernels.tensor_checks import no_values, row_major
from trimtab.layout import align_up
from trimtab.processes import end_behind_gloo

PART_ALIGNMENT = 8


class OverGroup(SharedWhenCopied):
    """Base of the transports over a process group; `group` and `guard` as for `AllToAll`. Guarded or
    not, over Gloo the process does not end before its threads are done.
    """

    def __init__(self, group: dist.ProcessGroup, *, guard: Guard | bool = True) -> None:
        self.group = group
        self.guard: Guard | None = None
        if guard is not False:
            self.guard = (Guard() if guard is True else guard).join(group, type(self).__name__)
        elif has_gloo(group):
            end_behind_gloo()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def refuse_without_values(self, like: Tensor) -> None:
        """Raises InputError: nobody can read how many rows there are."""
        if no_values(like.device):
            raise InputError(
                "on the meta device and under FakeTensorMode no rows can be exchanged, for their counts have no "
                "values: take one rank's layer by itself, or plan the ranks by `trimtab.plan_memory`",
                rank=self.rank, phase="count",
            )  # fmt: skip


def watched(guard: Guard | None, collective: Callable[..., Any], *calls: tuple[Any, ...], **kwargs: Any) -> None:
    """Run a collective of torch.distributed, once for each tuple of its arguments, of which the first is the output.
    The guard waits where the host does: once, for all of them."""
    if guard is None or not guard.gloo or calls[0][0].device.type != "cpu":
        for args in calls:
            collective(*args, **kwargs)
    else:
        guard.wait(*(collective(*args, **kwargs, async_op=True) for args in calls))


def read(guard: Guard | None, counts: Tensor) -> Any:
    """`counts.tolist()`; for counts on a device the guard does the waiting, so that a lost rank is named."""
    if guard is None or not guard.waits or counts.device.type == "cpu":
        return counts.tolist()
    guard.wait(arrival := Arrival(counts))
    return arrival.values.tolist()


def row_bytes(like: Sequence[Tensor]) -> int:
    """B of rows that hold one row [*] of each tensor [n, *]."""
    return sum(align_up(t.shape[1] * t.element_size(), PART_ALIGNMENT) for t in like)


def empty_rows(rows: int, like: Sequence[Tensor]) -> Tensor:
    """Memory for packed rows, [rows, B] uint8."""
    return like[0].new_empty(rows, row_bytes(like), dtype=torch.uint8)


def pack(
    tensors: Sequence[Tensor], row_token_M: Tensor | None = None, empty: Callable[..., Tensor] = empty_rows
) -> Tensor:
    """Tensors [n, *] of any dtypes as one [n, B] uint8, or their rows [M, B] at these tokens. Each byte is copied once,
    and all rows of a single tensor that needs no padding not at all. empty: as `empty_rows`."""
    first = tensors[0]
    packed = len(tensors) == 1 and first.is_contiguous() and first.shape[1] * first.element_size() == row_bytes(tensors)
    if packed and row_token_M is None:
        return row_major(first.detach()).view(torch.uint8)
    out = empty((first if row_token_M is None else row_token_M).shape[0], tensors)
    for part, tensor in zip(unpack(out, tensors), tensors, strict=True):
        if row_token_M is None:
            part.copy_(tensor.detach())
        else:
            source, each = tensor.detach(), 8 // tensor.element_size()
            whole = source.device.type != "cpu" and source.is_contiguous() and source.shape[1] % each == 0
            if whole and source.storage_offset() % each == 0:  # a GPU copies element by element
                source, part = source.view(torch.int64), part.view(torch.int64)
            torch.index_select(source, 0, row_token_M, out=part)
    return out


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of [n, B], in its memory, as [n, *] with the widths and dtypes of `like` (whose own n may differ); each
    counts its own changes in place."""
    parts, start = [], 0
    for tensor in like:
        size = tensor.shape[1] * tensor.element_size()
        parts.append(packed[:, start : start + size].view(tensor.dtype).data)
        start += align_up(size, PART_ALIGNMENT)
    return parts
