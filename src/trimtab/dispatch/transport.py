"""The protocol of transports, which exchange counts and rows between the ranks of one expert group.

A transport knows nothing of experts, weights or gradients, and never asks whether a count is zero.

Legend: T local tokens, P ranks, C columns of the message, M rows sent, M' rows received.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from trimtab.dispatch import LAYER_FILE


@dataclass(frozen=True, kw_only=True)
class SplitSizes:
    """Numbers of rows that this rank sends to and receives from each rank, on the host.

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
    """Messages that the ranks exchanged before data moves, on the host.

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
        Tensors of one call differ in dtype and width, which are the same on all ranks. tokens: [P] each rank's T."""

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        """Rows [M, *] of each tensor, grouped by rank, to their ranks: [M', *] each, by source rank. They belong to the
        caller, and may be parts of longer rows (`route.combine_parts`). tokens: as in `dispatch`."""


def layer_frame(layer: str) -> Callable[..., Any]:
    """A function that returns fn(*args) of its own arguments (fn, *args), through a stack frame called `layer`: Flight
    Recorder dumps, py-spy, profilers and tracebacks know functions by the name in their code, and nothing else."""
    code = _call.__code__.replace(co_name=layer, co_qualname=layer, co_filename=LAYER_FILE, co_firstlineno=1)
    return types.FunctionType(code, _call.__globals__)  # torch.compile looks for the builtins in them


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)
