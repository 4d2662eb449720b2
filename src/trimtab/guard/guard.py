"""The guard of one expert group: a hang or a death becomes a sentence that says who, where and for how long.

Each rank writes its place into its own memory; nothing is sent. Where a collective over Gloo fails or outlives its
deadline, this rank looks at the records and processes of the ranks of its host, judges, and leaves its verdict in its
record, so that all raise the first cause. Who waits reads the records of the others, from the first collective on. With
a device the host waits only where it reads counts. No thread runs but while the store is asked for the peers.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol, Self

import torch.distributed as dist

from trimtab.errors import ConfigError, DesyncError, TrimtabError, first_line
from trimtab.guard.peers import Arrival, Introductions, PeerInfo, has_gloo, has_store, timeout_of
from trimtab.guard.record import Place, RankRecord
from trimtab.guard.verdict import Seen, Verdict, in_the_world, judge
from trimtab.processes import end_behind_gloo

DEADLINE = 300.0
"""Seconds. Longer than a checkpoint or an evaluation that one rank does alone, shorter than a lost hour."""
_PATIENCE = 1.0
"""Seconds: a process that dies closes its connections a moment before it is seen to be gone."""
_SLICE = timedelta(milliseconds=100)
_SELDOM = 2.0
"""Seconds from one question to the store to the next at most, while the peers of a first collective are not known."""


class Waiting(Protocol):
    """A collective in flight, as `torch.distributed.Work` is one."""

    def wait(self, timeout: timedelta) -> object:
        """Return when it is done; RuntimeError if it failed, or is not done within `timeout`."""

    def is_completed(self) -> bool:
        """True once it has ended, well or not."""


class ExchangeLock:
    """One thread of a rank at a time is in an exchange of a process group, whatever guards and transports that has; it
    may enter again what it is in. `holder`: the name of the thread that has it, or had it last."""

    def __init__(self) -> None:
        self._lock, self.holder = threading.RLock(), "another"

    def acquire(self) -> bool:
        """Take it for this thread; False where another has it. Never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        self.holder = threading.current_thread().name
        return True

    def release(self) -> None:
        self._lock.release()


_LOCKS: weakref.WeakKeyDictionary[dist.ProcessGroup, ExchangeLock] = weakref.WeakKeyDictionary()


class SharedWhenCopied:
    """Holds process groups, which can be neither copied nor pickled: a copied layer shares the object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Guard(SharedWhenCopied):
    """Watches over one process group. Made by a transport, or by hand and given to several transports of one group.

    Args:
        deadline: seconds that this rank waits in one collective for its peers before it says who is missing. Never
            more than 9/10 of the process group's own timeout, which would end the wait without a name.

    Raises:
        ConfigError: a deadline that is not above 0.
    """

    def __init__(self, *, deadline: float = DEADLINE) -> None:
        if not deadline > 0:
            raise ConfigError(f"deadline {deadline} s must be above 0")
        self.deadline = deadline
        self.layers = 0
        self._group: dist.ProcessGroup | None = None
        self._peers: dict[int, tuple[PeerInfo, RankRecord | None]] | None = None
        self._first, self._meeting = True, threading.Thread()
        self._verdict: Verdict | None = None

    def join(self, group: dist.ProcessGroup, transport: str = "") -> Guard:
        """Begin to watch `group`. Every rank of it must call, in the same order where it has several guards.

        transport: the kind that the first caller exchanges by; ranks with different kinds never meet.
        """
        if self._group is not None:
            if self._group is not group:
                raise ConfigError("this guard watches another process group: give each group a guard of its own")
            return self
        self._group, self._transport = group, transport
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._lock = _LOCKS.setdefault(group, ExchangeLock())  # its other guards share it
        self.gloo, self.waits = has_gloo(group), has_store(group)
        self._record = RankRecord.create(self.rank)
        self._finish = weakref.finalize(self, _leave, self._record, os.getpid())
        if self.gloo:
            end_behind_gloo()
        if self.waits:
            self.deadline = min(self.deadline, 0.9 * timeout_of(group))
            self._introductions = Introductions(group, "guard")
            self._introductions.say(record=self._record.fd, transport=transport)
        return self

    def at(self, layer: str, phase: str, direction: str, call: int, state: str = "in") -> None:
        """This rank is there now. No communication, about two microseconds."""
        self._record.write(layer, phase, direction, call, state)

    def place(self) -> Place | None:
        """The place of this rank, by its own record."""
        return self._record.place()

    def wait(self, *works: Waiting) -> None:
        """Wait for collectives over Gloo or through shared memory, or for values from a device (`Arrival`), in slices,
        so that this thread stays in charge.

        Raises:
            PeerLost, PhaseTimeout: the first cause, the same on every rank of this host.
            TrimtabError: what another rank of this host published with `fail`.
        """
        start = ask = time.monotonic()
        self._record.wait(True)
        try:
            for work in works:
                lost = False
                while not (answer := settled(work))[0]:
                    if answer[0] is False:
                        raise self._judged(start, answer[1])
                    if self._peers is None and (now := time.monotonic()) >= ask:
                        self._try_to_meet(_SLICE.total_seconds(), whole=True)
                        ask = now + min(now - start, _SELDOM)
                    if (known := self._known()) is not None:
                        raise known.error(self._waited(start))
                    # Other work fails by itself. A rank may have answered just before it ended: look twice.
                    before, lost = lost, isinstance(work, Introductions | Arrival) and self._lost()
                    if (before and lost) or time.monotonic() - start >= self.deadline:
                        raise self._judged(start, "")
        except BaseException:
            for work in works:
                if isinstance(work, dist.Work):  # what waits in shared memory has no thread behind it
                    _outlive(work)
            if not all(work.is_completed() for work in works):
                _outlive(self._group)
            raise
        self._record.wait(False)
        if self._first:
            self._first, self._peers = False, self._peers or self._meet()

    @contextmanager
    def alone(self, layer: str, phase: str) -> Iterator[None]:
        """For an exchange, that of other threads of this rank beside it is refused: in which order they come differs
        from rank to rank, and the rows of one would meet the counts of another.

        Raises:
            DesyncError: another thread is inside. It and the other ranks raise it too where they wait under a guard,
                and the group is of no more use.
        """
        if not self._lock.acquire():
            error = DesyncError(
                f"thread {threading.current_thread().name!r} began an exchange while thread {self._lock.holder!r} of "
                "this rank was in one. All ranks must exchange in one order: call the layers of a group from one "
                "thread at a time, in the same order on every rank",
                rank=self.rank, layer=layer, phase=phase,
            )  # fmt: skip
            self.fail(error)
            raise error
        try:
            yield
        finally:
            self._lock.release()

    def fail(self, error: TrimtabError, own: Guard | None = None) -> None:
        """Publish an error that only this rank has seen: the ranks of this host raise it too instead of waiting.

        own: of another group, in which the error arose."""
        verdict = Verdict.of(error)
        for guard in (self, own):
            if guard is not None and guard._verdict is not None:  # published without what this rank did meanwhile
                before, found, _ = verdict.message.partition(guard._verdict.message)
                verdict = replace(verdict, message=before + found)
        self._publish(verdict)

    def in_the_world(self, error: TrimtabError) -> TrimtabError:
        """`error`, which counts ranks in this group, for those who may be in others: it says who they are."""
        return error if self._group is None else in_the_world(error, dist.get_process_group_ranks(self._group))

    def _meet(self) -> dict[int, tuple[PeerInfo, RankRecord | None]]:
        """Learn who the peers are. Those that have come to a first collective have all said it before."""
        return {peer.rank: (peer, peer.open()) for peer in self._introductions.read() if peer.rank != self.rank}

    def _try_to_meet(self, seconds: float, *, whole: bool) -> None:
        """In a thread of its own, for the store may be as dead as a peer. whole: not before all have spoken."""

        def meet() -> None:
            with suppress(Exception):  # whatever the store raises
                if not whole or self._introductions.is_completed():
                    self._peers = self._meet()

        if not whole or not self._meeting.is_alive():
            self._meeting = threading.Thread(target=meet, daemon=True)
            self._meeting.start()
            self._meeting.join(seconds)

    def _known(self) -> Verdict | None:
        """The first cause, if some rank of this host has found it."""
        if self._verdict is None and self._peers is not None:
            notes = (record.note() for _, record in self._peers.values() if record is not None)
            self._verdict = next(filter(None, map(Verdict.in_note, notes)), None)
        return self._verdict

    def _judged(self, start: float, failure: str) -> TrimtabError:
        """The error to raise: a cause that is known by now, or this rank's own verdict, published to the others."""
        if self._peers is None:
            self._try_to_meet(_PATIENCE, whole=False)
        end = time.monotonic() + (_PATIENCE if failure else 0.0)
        while self._known() is None and time.monotonic() < end:
            if self._lost():
                break
            time.sleep(0.02)
        verdict = self._known()
        if verdict is None:
            here = self.place() or Place(layer="", phase="count", direction="forward", call=0)
            if self._peers is None:
                message = f"the store of the group does not answer, so nothing is known of the other ranks. {failure}"
                verdict = Verdict(kind="PeerLost", message=message.strip(), layer=here.layer, phase=here.phase)
            else:
                kind = self._transport if self._first else None
                verdict = judge(self._seen(), here, self.deadline, failure, first=kind)
            self._publish(verdict)
        return verdict.error(self._waited(start))

    def _seen(self) -> list[Seen]:
        """The other ranks as they are seen now."""
        seen = []
        for peer, record in (self._peers or {}).values():
            process = peer.state()
            note = "" if record is None else record.note()
            place = None if record is None else record.place()
            seen.append(Seen(peer=peer, process=process, place=place, left="" if note.startswith("{") else note))
        return seen

    def _lost(self) -> bool:
        """True where a rank of this host is gone, or has left the group."""
        return any(s.left or s.process == "gone" for s in self._seen())

    def _publish(self, verdict: Verdict) -> None:
        self._record.write_note(verdict.to_note())
        self._verdict = verdict

    def _waited(self, start: float) -> str:
        return f"Rank {self.rank} was {self.place()} ({time.monotonic() - start:.1f} s)."


def settled(work: Waiting) -> tuple[bool | None, str]:
    """Wait a slice: True where it is done, False where it has failed, None where it is under way; and what it said."""
    said = ""
    for _ in range(2):  # once completed it says at once whether it failed, or was done just after the slice's end
        try:
            work.wait(_SLICE)
            return True, ""
        except RuntimeError as error:
            said = first_line(error)
        if not work.is_completed():
            return None, said
    return False, said


def _outlive(left: object) -> None:
    """Leave a group, or a collective of one, behind for good: a Gloo group that is destroyed waits for the collectives
    in flight, and a thread of Gloo's that frees tensors while the interpreter ends aborts the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))


def _leave(record: RankRecord, pid: int) -> None:
    """The guard or its process ends: say so in the record."""
    if os.getpid() != pid:  # a forked child shares the memory, but it is not the rank
        return
    error = getattr(sys, "last_value", None)
    if not record.note():
        ended = "it ended its program or gave up its transport"
        record.write_note(ended if error is None else f"it ended with {type(error).__name__}: {error}")
    record.close()
