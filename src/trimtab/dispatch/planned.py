"""All-to-all between ranks of which one alone is there, without values: how many rows come and go is given.

For planning on meta or fake tensors, over torch's "fake" backend. Rows, buffers, their lives are those of `AllToAll`.

Legend: P ranks, C columns of the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch import facts
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.over_group import empty_rows
from trimtab.dispatch.transport import Handshake
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.kernels.buffer_pool import SLACK, SMALL, HostBufferPool, rounded

NAME = "planned"


class Call(NamedTuple):
    """One rank's call of a layer; T = tokens, K = top_k."""

    tokens: int
    top_k: int
    experts: int
    rank: int
    ranks: int


class Moved(NamedTuple):
    """Numbers [P] that leave one rank, or that come to it: rows, kept slots, replicas of experts, slots of these."""

    rows: Sequence[int]
    slots: Sequence[int]
    replicas: Sequence[int] = ()
    replica_slots: Sequence[int] = ()


Traffic = Callable[[Call], tuple[Moved, Moved]]
"""What a rank sends in a call, and what it receives. Called outside of any dispatch mode, so that it may compute."""


class Pool(HostBufferPool):
    """Lends memory without values, and has it back once nothing else refers to it. bounds: it holds as much at any
    time as calls of other sizes than these might have left, none of them larger."""

    def __init__(self, bounds: bool = False) -> None:
        super().__init__()
        self._bounds, self._rest = bounds, list[Any]()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL:
            return torch.empty(shape, dtype=dtype)
        size = rounded(size)
        self.count()  # what came back did so before this call
        if self._bounds and self._free and not self._rest:  # which has traveled, and is known by that
            self._rest.append(self._free.popleft())
            self.idle -= len(self._rest[0])
        for rest in self._rest:
            rest.untyped_storage().resize_(0)
        self._news.append(size)
        found: Any = self._enter(size)
        lent: Any = torch.empty(size, dtype=torch.uint8) if found is None else found
        self._out[id(lent)] = lent
        for rest in self._rest:
            rest.untyped_storage().resize_(int(self.most * SLACK) - self.used - self.idle)
        values = torch.empty(0, dtype=dtype).set_(lent.view(dtype))  # not of a storage: `set_` keeps a reference to it
        return values.resize_(shape)

    def _count_news(self) -> None:
        out: Any = self._out  # beside the tensor here and the storage that asks, others refer to what is lent
        uses = {at: torch._C._storage_Use_Count(lent.untyped_storage()._cdata) for at, lent in out.items()}
        self._news.extend([out.pop(at) for at, count in uses.items() if count <= 2])
        super()._count_news()


class Planned(AllToAll):
    """A transport whose handshake is given; never guarded.

    Args:
        group: ranks of the "fake" backend.
        traffic: how many rows, slots and replicas go where.
        rounds: rows lie in memory of powers of two that is used again, as on the CPU.
        bounds: see `Pool`.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, traffic: Traffic, rounds: bool = False, bounds: bool = False,
        guard: Any = False,
    ) -> None:  # fmt: skip
        super().__init__(group, guard=False)
        self.traffic, self._rounds = traffic, rounds
        self._pool = Pool(bounds)

    def handshake(self, message_PC: Tensor) -> Handshake:
        known: list[list[int]] = message_PC.known  # type: ignore[attr-defined]
        sent, received = ([list(row) for row in known] for _ in range(2))
        first = known[0]
        if facts.MOVEMENTS[first[facts.MOVEMENT]][0] != "count":  # peers expect what it sends, and the other way
            for row in received:
                row[facts.ROWS], row[facts.SLOTS] = row[facts.SLOTS], row[facts.ROWS]
        elif first[facts.ROWS] < 0:  # else, over etp, each peer sends as many to every rank as this one
            for rows, moved in zip((sent, received), self._counts(first), strict=True):
                columns = (facts.ROWS, facts.SLOTS, facts.REPLICAS, facts.REPLICA_SLOTS)
                for column, values in zip(columns, moved, strict=True):
                    for row, value in zip(rows, values):  # noqa: B905  # none where nothing is replicated
                        row[column] = value
                for row in rows:  # an expert's slots, where they are asked for: all alike
                    places = len(row) - facts.COLUMNS
                    row[facts.COLUMNS :] = [(row[facts.SLOTS] + place) // places for place in range(places)]
        return Handshake(sent=sent, received=received, everyone=[])

    def _counts(self, known: list[int]) -> tuple[Moved, Moved]:
        sizes = known[facts.TOKENS], known[facts.TOP_K], known[facts.EXPERTS]
        call = Call(*sizes, rank=self.rank, ranks=self.size)
        with ThreadPoolExecutor(1) as apart:  # a thread of its own is in none of this one's dispatch modes
            return apart.submit(self.traffic, call).result()

    def _rows(self, rows: int, like: Sequence[Tensor]) -> Tensor:
        return super()._rows(rows, like) if self._rounds else empty_rows(rows, like)


def planned(traffic: Traffic, *, rounds: bool = False, bounds: bool = False) -> AbstractContextManager[Any]:
    """Have a row `NAME` in `TRANSPORTS`, see `Planned`, for the models that are built inside."""
    return patch.dict(TRANSPORTS, {NAME: partial(Planned, traffic=traffic, rounds=rounds, bounds=bounds)})
