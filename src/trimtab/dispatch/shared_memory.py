"""Shared memory between the ranks of one host: a sender gathers rows straight into the memory that the receiver named,
all meet, and that memory is the received tensors; it comes back to the pool when the last of them is gone.

Legend: T local tokens, P ranks, C columns of the message, M rows sent, M' rows received.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.host_memory import LIMITS, SLOT_BYTES, HostMemory, Slot
from trimtab.dispatch.over_group import OverGroup
from trimtab.dispatch.transport import Handshake, SplitSizes
from trimtab.errors import BackendError, PeerLost, PhaseTimeout, TrimtabError
from trimtab.guard.guard import Guard, Waiting, settled
from trimtab.guard.peers import timeout_of
from trimtab.layout import align_up

_ALIGNMENT = 64


class SharedMemory(OverGroup):
    """Transport through shared memory, for CPU tensors and ranks of one host. Same results as `AllToAll`, bit for bit.

    The memory has no name in any file system: nothing is left behind, however the ranks end. It grows with the rows
    that are in use at once and is kept until the transport and what it gave out are gone.

    Args:
        group: the expert group; only its store is used. Every rank of it must build its transport.
        guard: as for `AllToAll`.
        agree: where this system has no shared memory of the kind, raise in the first exchange, on every rank.

    Raises:
        BackendError: this system has no shared memory of the kind. In the first exchange, on every rank: one of them
            cannot open a peer's. In any: tensors of a device, no memory for the rows, or an exchange before was given
            up, here or by another rank (with a guard that rank's own error is raised).
        ConfigError: in the first exchange, on every rank: they are not all on one host, or bring tensors of a device.
        DesyncError: in any exchange, on every rank: one of them has left a call in the middle and is in another.
        PeerLost, PhaseTimeout: in any exchange; without a guard no error names layer and phase.
    """

    def __init__(self, group: dist.ProcessGroup, *, guard: Guard | bool = True, agree: bool = False) -> None:
        super().__init__(group, guard=guard)
        self._host = HostMemory(group)
        if self._host.lack and not agree:
            raise BackendError(f"{self._host.lack}; {LIMITS}", rank=self.rank)
        self._timeout = timeout_of(group)
        self._met = False
        self._broken = ""

    def handshake(self, message_PC: Tensor) -> Handshake:
        with self._exchange("counts", message_PC):
            messages_PPC = self._host.messages(message_PC.shape[1])
            messages_PPC[self.rank].copy_(message_PC)
            self._meet(self._host.inbox, rows=False)
            everyone = messages_PPC.tolist()
        return Handshake(sent=everyone[self.rank], received=[row[self.rank] for row in everyone], everyone=everyone)

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        return self._move(tensors, row_token_M, splits)

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        return self._move(tensors, None, splits)

    def meet_peers(self, device: torch.device) -> None:
        """Get to know the peers, as the first exchange does, and raise what it does. All ranks must call, or exchange.
        device: of the tensors that this rank brings."""
        with self._exchange("introductions", torch.empty(0, device=device)):
            pass

    def _move(self, tensors: Sequence[Tensor], row_token_M: Tensor | None, splits: SplitSizes) -> list[Tensor]:
        with self._exchange("rows", tensors[0]):
            host, sources = self._host, [tensor.detach() for tensor in tensors]
            cuts = [0, *accumulate(splits.outgoing)]
            for rank in range(self.size):
                column = [row[rank] for row in splits.everyone]
                layout = _layout(sources, sum(column))
                memory = host.inbox_of(rank, layout[-1])
                first, rows = sum(column[: self.rank]), splits.outgoing[rank]
                mine = slice(cuts[rank], cuts[rank + 1])
                for source, begin in zip(sources, layout, strict=False):
                    out = _part(memory, begin, source, first, rows)
                    if row_token_M is None:
                        out.copy_(source[mine])
                    else:
                        torch.index_select(source, 0, row_token_M[mine], out=out)
            inbox, total = host.inbox, sum(splits.incoming)
            layout = _layout(sources, total)
            self._meet(host.take(layout[-1], besides=inbox), rows=True)
            memory = inbox.bytes(layout[-1])
            parts = [_part(memory, start, like, 0, total) for like, start in zip(sources, layout, strict=False)]
            return [part.data for part in parts]  # each counts its own changes in place

    def _meet(self, next_inbox: Slot, *, rows: bool) -> None:
        """All ranks come here before any goes on."""
        self._wait(self._host.arrive(next_inbox, rows=rows))
        try:
            self._host.turn()
        except TrimtabError as error:  # which all ranks see, and raise
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def _wait(self, work: Waiting) -> None:
        wait_for(work, self.guard, self._timeout)

    @contextmanager
    def _exchange(self, what: str, like: Tensor) -> Iterator[None]:
        """At the first, get to know the peers. After an error this transport is of no more use: this rank's next ring
        would be taken for the one that is missing.

        Raises BackendError in place of what the system says.
        """
        if self._broken:
            raise BackendError(
                f"this shared memory was given up on rank {self.rank} ({self._broken}): build new transports on all "
                "ranks",
                rank=self.rank,
            )
        try:
            if not self._met:
                self._host.meet(like.device, self._wait)
                self._met = True
                self._meet(self._host.inbox, rows=False)
            if like.device.type != "cpu":
                raise RuntimeError(f"rank {self.rank} brings tensors of {like.device}")
            self.refuse_without_values(like)
            yield
        except TrimtabError as error:
            self._leave(error)
            raise
        except BaseException as error:
            failed = self._failed(error, what)
            self._leave(error, tell=failed)
            if isinstance(error, Exception):
                raise failed from error
            raise

    def _leave(self, error: BaseException, *, tell: TrimtabError | None = None) -> None:
        """Take part in no further exchange, and see that the others do not wait. tell: what they do not know yet."""
        if self._broken:
            return
        self._broken = f"{type(error).__name__}: {error}"
        if self.guard is not None and self.guard.gloo:
            if tell is not None:
                self.guard.fail(tell)
        elif self._met:
            self._host.give_up()

    def _failed(self, error: BaseException, what: str) -> BackendError:
        place = None if self.guard is None else self.guard.place()
        lacking = isinstance(error, OSError | MemoryError)
        advice = "free memory or raise this process's limits (ulimit -a), or use the transport alltoall; " * lacking
        return BackendError(
            f"{type(error).__name__} inside an exchange of {what} through shared memory: {error}; {advice}build new "
            "transports on all ranks",
            rank=self.rank, layer=place.layer if place else None, phase=place.phase if place else None,
        )  # fmt: skip


def wait_for(work: Waiting, guard: Guard | None, timeout: float) -> None:
    """Wait with the guard, or without one until `timeout` seconds have passed. Ranks are named if `work` names them:
    `gone`, and `missing`.

    Raises:
        PeerLost: it failed. PhaseTimeout: it took longer. With a guard what `Guard.wait` does.
    """
    if guard is not None and guard.gloo:
        guard.wait(work)
        return
    end = time.monotonic() + timeout
    while not (answer := settled(work))[0]:
        missing = tuple(getattr(work, "missing", ()))
        if answer[0] is False:
            raise PeerLost(answer[1], ranks=getattr(work, "gone", missing))
        if time.monotonic() > end:
            raise PhaseTimeout(f"{answer[1]} within {timeout:g} s", ranks=missing)


def _layout(like: Sequence[Tensor], rows: int) -> list[int]:
    """Offsets at which each part of so many rows starts, and the end of the last."""
    sizes = [align_up(rows * t.shape[1] * t.element_size(), _ALIGNMENT) for t in like]
    layout = [0, *accumulate(sizes)]
    if layout[-1] > SLOT_BYTES:
        raise BackendError(f"{layout[-1]} bytes of rows for one rank: shared memory holds {SLOT_BYTES}")
    return layout


def _part(memory: Tensor, start: int, like: Tensor, first: int, rows: int) -> Tensor:
    """Rows first .. first + rows - 1 of the part that starts there, with the width and dtype of `like`."""
    width = like.shape[1] * like.element_size()
    begin = start + first * width
    return memory[begin : begin + rows * width].view(like.dtype).view(rows, like.shape[1])
