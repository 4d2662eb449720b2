"""Ranks in one process: threads that take turns, and the two ways in which they hand rows to each other.

Exactly one rank runs at a time, from one exchange to the next, so a world is as deterministic as a loop over its ranks
although every rank runs the code that a real one runs, forward and backward.

Legend: P ranks, C columns of the header, M rows sent, M' rows received, B bytes of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from trimtab.dispatch.over_group import pack, unpack
from trimtab.dispatch.transport import Handshake, SplitSizes

Result = TypeVar("Result")


class Abandoned(Exception):
    """Another rank of the world failed, so this one cannot go on."""


class OutOfStep(Exception):
    """The ranks of a world do not make the same exchanges."""


class Turns:
    """The baton of a world of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._failure: BaseException | None = None
        self._gates = [threading.Lock() for _ in range(ranks)]
        for gate in self._gates:
            gate.acquire()
        self._given: list[tuple[str, Any]] = [("", None)] * ranks
        self._round: list[tuple[str, Any]] = []
        self._rounds = 0
        self._swaps = [0] * ranks
        self._ended = [False] * ranks

    def swap(self, rank: int, kind: str, value: Any) -> list[Any]:
        """Give `value`, let every other rank come this far, and see what each gave, by rank.

        Raises:
            OutOfStep: the ranks are not all in an exchange of this kind.
        """
        self._given[rank] = (kind, value)
        self._swaps[rank] += 1
        if rank == self.ranks - 1:
            self._round, self._given = self._given, [("", None)] * self.ranks
            self._rounds += 1
        self._pass_on(rank)
        self._gates[rank].acquire()
        if self._failure is not None:
            raise Abandoned
        if self._rounds != self._swaps[rank] or any(given != kind for given, _ in self._round):
            raise OutOfStep(
                f"rank {rank} exchanges {kind}, the ranks {[given or 'nothing' for given, _ in self._round]}"
            )
        return [value for _, value in self._round]

    def run(self, program: Callable[[int], Result]) -> list[Result]:
        """`program(rank)` on every rank; what each returned. The first failure is raised."""
        results: dict[int, Result] = {}

        def body(rank: int) -> None:
            self._gates[rank].acquire()
            try:
                if self._failure is None:
                    results[rank] = program(rank)
            except BaseException as error:  # of any rank: raised below, in the caller's thread
                self._failure = self._failure or error
            self._ended[rank] = True
            self._pass_on(rank)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(1, self.ranks)]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        body(0)
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.ranks)]

    def _pass_on(self, rank: int) -> None:
        """To the next rank that still runs, which may be this one."""
        ring = ((rank + step) % self.ranks for step in range(1, self.ranks + 1))
        following = next((other for other in ring if not self._ended[other]), None)
        if following is not None:
            self._gates[following].release()


class MemoryGroup:
    """As much of a process group as `torch.distributed.all_gather_into_tensor` asks for."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self.turns, self._rank = turns, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.turns.ranks

    def all_gather_single(self, out: Tensor, rows: Tensor, options: object) -> None:
        torch.cat(self.turns.swap(self._rank, "all_gather", rows.detach()), out=out)

    _allgather_base = all_gather_single  # its name before torch 2.13


class MemoryTransport:
    """Rows go straight to the rank that needs them, as `AllToAll` sends them; sizes are checked on arrival."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self.turns, self.rank, self.size = turns, rank, turns.ranks

    def handshake(self, message_PC: Tensor) -> Handshake:
        everyone = self.turns.swap(self.rank, "headers", message_PC.tolist())
        return Handshake(sent=everyone[self.rank], received=[row[self.rank] for row in everyone], everyone=[])

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        return self.combine([t.index_select(0, row_token_M) for t in tensors], splits, tokens)

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        sent = self.turns.swap(self.rank, "rows", torch.split(pack(tensors).detach(), list(splits.outgoing)))
        mine = [parts[self.rank] for parts in sent]
        sizes = tuple(part.shape[0] for part in mine)
        if sizes != splits.incoming:
            raise OutOfStep(f"rank {self.rank} expects {splits.incoming} rows by source and is sent {sizes}")
        return unpack(torch.cat(mine), tensors)
