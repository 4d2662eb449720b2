"""What a transport is: it counts, and it moves rows between the ranks of one expert group.

A transport knows nothing of experts, weights or gradients, and never asks whether a count is zero. What belongs to a
token travels together, packed as bytes of one row:

    [ tokens D x dtype | weights K x float32 | ids K x int32 ]      each part starts at a multiple of 8 bytes

Legend: n rows, T local tokens, P ranks, C columns of the message, M rows sent, M' rows received, B bytes of a row.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch import LAYER_FILE
from trimtab.errors import InputError
from trimtab.guard.guard import Guard, SharedByCopies
from trimtab.guard.peers import has_gloo
from trimtab.kernels.memory import no_values, row_major
from trimtab.launched import end_behind_gloo
from trimtab.layout import align_up


@dataclass(frozen=True, kw_only=True)
class SplitSizes:
    """How many rows this rank sends to and receives from each rank, on the host.

    everyone[s][d] is what rank s sends to rank d, for the transports that need to know it; else empty.
    """

    outgoing: tuple[int, ...]
    incoming: tuple[int, ...]
    everyone: tuple[tuple[int, ...], ...] = ()

    def reversed(self) -> SplitSizes:
        """The splits of the way back."""
        transposed = tuple(zip(*self.everyone, strict=True))
        return SplitSizes(outgoing=self.incoming, incoming=self.outgoing, everyone=transposed)


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """What the ranks told each other before data moves, on the host.

    sent[p]: this rank's message for rank p; received[p]: rank p's message for this rank.
    everyone[s][d]: rank s's message for rank d, where the transport gathers them all; else empty.
    """

    sent: list[list[int]]
    received: list[list[int]]
    everyone: list[list[list[int]]]

    def split_sizes(self, column: int) -> SplitSizes:
        """The splits that one column counts."""
        return SplitSizes(
            outgoing=tuple(message[column] for message in self.sent),
            incoming=tuple(message[column] for message in self.received),
            everyone=tuple(tuple(message[column] for message in row) for row in self.everyone),
        )


def refuse_without_values(message_PC: Tensor, rank: int) -> None:
    """Raises:
    InputError: nobody can read how many rows there are.
    """
    if no_values(message_PC.device):
        raise InputError(
            "on the meta device and under FakeTensorMode no rows can be exchanged, for their counts have no values: "
            "take one rank's layer by itself, with its share of the experts",
            rank=rank, phase="count",
        )  # fmt: skip


class OverGroup(SharedByCopies):
    """What the transports over a process group have in common; `group` and `guard` as for `AllToAll`. Whether guarded
    or not, over Gloo the process does not end before its threads are done.
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


def watched(guard: Guard | None, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a collective of torch.distributed whose first argument is its output. The guard waits where the host does."""
    if guard is None or not guard.gloo or args[0].device.type != "cpu":
        collective(*args, **kwargs)
    else:
        guard.wait(collective(*args, **kwargs, async_op=True))


class Transport(Protocol):
    """One expert group. Every method is a collective: all ranks of the group call it, in the same order.

    A transport that is guarded has its `Guard` as `guard`.
    """

    rank: int
    size: int

    def handshake(self, message_PC: Tensor) -> Handshake:
        """Give row p of `message_PC` [P, C] int64 to rank p. The only host sync of a layer."""

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        """Rows `t[row_token_M]` of each tensor [T, *], grouped by rank, to their ranks: [M', *] each, by source rank.

        Tensors of one call differ in dtype and width, which are the same on all ranks. tokens: [P] each rank's T.
        """

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        """Rows [M, *] of each tensor, grouped by rank, to their ranks: [M', *] each, grouped by source rank.

        tokens: as in `dispatch`.

        What comes out belongs to the caller; its rows may be parts of longer ones (`route.combine_parts`).
        """


def layer_frame(layer: str) -> Callable[..., Any]:
    """A function that returns fn(*args) of its own arguments (fn, *args), through a stack frame called `layer`.

    Flight Recorder dumps, py-spy, profilers and tracebacks know functions by the name in their code, and nothing else.
    """
    code = _call.__code__.replace(co_name=layer, co_qualname=layer, co_filename=LAYER_FILE, co_firstlineno=1)
    return types.FunctionType(code, _call.__globals__)  # torch.compile looks for the builtins in them


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


PART_ALIGNMENT = 8


def row_bytes(like: Sequence[Tensor]) -> int:
    """B of rows that hold one row [*] of each tensor [n, *]."""
    return sum(align_up(t.shape[1] * t.element_size(), PART_ALIGNMENT) for t in like)


def packed_already(tensors: Sequence[Tensor]) -> bool:
    """Whether they are packed rows as they lie in memory: one tensor, whose rows need no padding."""
    first = tensors[0]
    return len(tensors) == 1 and first.is_contiguous() and first.shape[1] * first.element_size() == row_bytes(tensors)


def pack(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Tensors [n, *] of any dtypes as one [n, B] uint8. Without `out`, what is packed already is not copied."""
    if out is None and packed_already(tensors):
        return row_major(tensors[0].detach()).view(torch.uint8)
    if out is None:
        out = torch.empty(tensors[0].shape[0], row_bytes(tensors), dtype=torch.uint8, device=tensors[0].device)
    for part, tensor in zip(unpack(out, tensors), tensors, strict=True):
        part.copy_(tensor.detach())
    return out


def gather_packed(tensors: Sequence[Tensor], row_token_M: Tensor, out: Tensor) -> Tensor:
    """`out`, filled with rows [M, B] uint8 of the tensors [T, *] at these tokens: each byte is copied once."""
    for part, tensor in zip(unpack(out, tensors), tensors, strict=True):
        torch.index_select(tensor.detach(), 0, row_token_M, out=part)
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
