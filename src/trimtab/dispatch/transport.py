"""What a transport is: it counts, and it moves rows between the ranks of one expert group.

A transport knows nothing of experts, weights or gradients, and never asks whether a count is zero.

Legend: T local tokens, P ranks, C columns of the header, M rows sent, M' rows received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from trimtab.errors import InputError
from trimtab.guard.group import has_gloo
from trimtab.guard.guard import Guard
from trimtab.guard.shared import SharedByCopies
from trimtab.kernels.memory import no_values
from trimtab.launched import end_behind_gloo


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

    sent[p]: this rank's header for rank p; received[p]: rank p's header for this rank.
    everyone[s][d]: rank s's header for rank d, where the transport gathers them all; else empty.
    """

    sent: list[list[int]]
    received: list[list[int]]
    everyone: list[list[list[int]]]

    def split_sizes(self, column: int) -> SplitSizes:
        """The splits that one column counts."""
        return SplitSizes(
            outgoing=tuple(header[column] for header in self.sent),
            incoming=tuple(header[column] for header in self.received),
            everyone=tuple(tuple(header[column] for header in row) for row in self.everyone),
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


def guard_of(transport: Transport | None) -> Guard | None:
    """The transport's guard, if it has one."""
    guard: Guard | None = getattr(transport, "guard", None)
    return guard


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
        ...

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        """Rows `t[row_token_M]` of each tensor [T, *], grouped by rank, to their ranks: [M', *] each, by source rank.

        Tensors of one call differ in dtype and width, which are the same on all ranks. tokens: [P] each rank's T.
        """
        ...

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        """Rows [M, *] of each tensor, grouped by rank, to their ranks: [M', *] each, grouped by source rank.

        tokens: as in `spread`: what all ranks know alike of how much there is.

        What comes out belongs to the caller; its rows may be parts of longer ones (`route.combine_parts`).
        """
        ...
