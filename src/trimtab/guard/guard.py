"""The guard of one expert group: a hang or a death becomes a sentence that says who, where and for how long.

    healthy    each rank writes its place into its own memory (a microsecond); nothing is sent, no thread runs on a
               group that lives on one host
    trouble    a collective fails, or a wait outlives its deadline: this rank looks at the others' records and at their
               processes, asks those on other hosts through the store, judges, and tells its verdict to all, so that
               every rank raises the first cause and none blames the neighbour who raised before it

The host can only watch what the host waits for: collectives over Gloo. With a device backend the record is kept (it is
told to peers on CPU groups and can be read), nothing waits and nothing is added.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_process_group_store

from trimtab.errors import ConfigError, DesyncError, TrimtabError, first_line
from trimtab.guard.group import has_gloo, outlive, store_host, timeout_of
from trimtab.guard.judge import Answer, Cause, DeadStore, judge, seconds_at
from trimtab.guard.last_words import LastWords, last_words_of
from trimtab.guard.peers import Peer
from trimtab.guard.place import DIRECTIONS, PHASES, STATES, Place, Slate, SlateView
from trimtab.guard.shared import SharedByCopies
from trimtab.guard.turn import turn_of
from trimtab.guard.waiting import SLICE, Waiting
from trimtab.guard.watch import Watch
from trimtab.launched import end_behind_gloo
from trimtab.validation import check_flags

DEADLINE = 300.0
"""Seconds. Longer than a checkpoint or an evaluation that one rank does alone, shorter than a lost hour."""
_NAMES = 120


class Guard(SharedByCopies):
    """Watches over one process group. Made by a transport, or by hand and given to several transports of one group.

    Args:
        deadline: seconds that this rank waits in one collective for its peers before it asks who is missing. Never
            more than 9/10 of the process group's own timeout, which would end the wait without a name.
        patience: seconds that ranks on other hosts have to answer.
        look: whether records of ranks on this host are read directly; else all are asked through the store.
    """

    def __init__(self, *, deadline: float = DEADLINE, patience: float = 1.0, look: bool = True) -> None:
        if not deadline > 0 or not patience > 0:
            raise ConfigError(f"deadline {deadline} s and patience {patience} s must be above 0")
        check_flags(look=look)
        self.deadline, self.patience, self.look = deadline, patience, look
        self.layers = 0
        self._group: dist.ProcessGroup | None = None
        self._met = False
        self._store_error = ""
        self._peers: dict[int, tuple[Peer, SlateView | None]] = {}
        self._watch: Watch | None = None
        self._cause: Cause | None = None

    def join(self, group: dist.ProcessGroup, transport: str = "") -> Guard:
        """Begin to watch `group`. Every rank of it must call, in the same order where it has several guards.

        transport: the kind that the first who calls exchanges by; ranks with different kinds never meet.
        """
        if self._group is not None:
            if self._group is not group:
                raise ConfigError("this guard watches another process group: give each group a guard of its own")
            return self
        self._group = group
        self.rank, self.size, self._turn = dist.get_rank(group), dist.get_world_size(group), turn_of(group)
        self.gloo = has_gloo(group)
        if self.gloo:
            self.deadline = min(self.deadline, 0.9 * timeout_of(group))
        self._slate = Slate(self.rank)
        self._watches: list[Watch] = []
        self._unopened: list[tuple[LastWords, str, Peer]] = []
        self._finish = weakref.finalize(self, _leave, self._slate, os.getpid(), self._watches, self._unopened)
        if not self.gloo:
            return self
        end_behind_gloo()
        store = _get_process_group_store(group)
        number = store.add(f"trimtab/guards/{self.rank}", 1)
        prefix = f"trimtab/guard/{number}"
        self._store = PrefixStore(prefix, store)
        self._world = dist.get_process_group_ranks(group)
        self._store_host = store_host(store, self._world)
        self._transport = transport
        me = Peer.me(self.rank, self._world[self.rank], self._slate.fd if self.look else -1, transport)
        self._store.set(f"peer/{self.rank}", me.to_json())
        if self.size > 1:
            self._unopened.append((last_words_of(group, store), prefix, me))
        return self

    def at(self, layer: str, phase: str, direction: str, call: int, state: str = "in") -> None:
        """This rank is there now. No communication, about two microseconds."""
        self._slate.write(
            layer.encode()[-_NAMES:], PHASES.index(phase), DIRECTIONS.index(direction), call, STATES.index(state)
        )

    def place(self) -> Place | None:
        """Where this rank is, by its own record."""
        return self._slate.view().place()

    def wait(self, work: Waiting) -> None:
        """Wait for a collective over Gloo, or through shared memory, in slices, so that this thread stays in charge.

        Raises:
            PeerLost, PhaseTimeout: the cause, the same on every rank. What else a rank published with `fail`.
        """
        start = time.monotonic()
        self._slate.wait(True)
        try:
            while not self._done(work, start):
                self._raise_known(start)
                waited = time.monotonic() - start
                if self._watch is not None and waited > self.deadline - self.patience:
                    self._watch.ask()
                if waited >= self.deadline:
                    raise self._judged(start, "")
        except BaseException:
            if isinstance(work, dist.Work):  # what waits in shared memory has no thread behind it
                outlive(work)
            if not work.is_completed():
                outlive(self._group)
            raise
        self._slate.wait(False)
        if not self._met:
            self._meet()
            self._unopened.clear()  # the others open this rank's record now as well
        elif self._watch is not None:
            self._watch.rest()

    @contextmanager
    def alone(self, layer: str, phase: str) -> Iterator[None]:
        """For an exchange, that of other threads of this rank beside it is refused: in which order they come differs
        from rank to rank, and the rows of one would meet the counts of another.

        Raises:
            DesyncError: another thread is inside. It and the other ranks raise it too where they wait under a guard,
                and the group is of no more use.
        """
        with self._turn.taken() as other:
            if other is not None:
                error = DesyncError(
                    f"thread {threading.current_thread().name!r} began an exchange while thread {other!r} of this rank "
                    "was in one. All ranks must exchange in one order: call the layers of a group from one thread at a "
                    "time, as a lock around the model or a queue before it sees to, in the same order on every rank",
                    rank=self.rank, layer=layer, phase=phase,
                )  # fmt: skip
                self.fail(error)
                raise error
            yield

    def fail(self, error: TrimtabError) -> None:
        """Tell the others of an error that only this rank has seen, so that they raise it too instead of waiting."""
        self._publish(Cause.of(error))

    def close(self) -> None:
        """Stop watching. Also done when the guard is collected and when the process ends."""
        self._finish()

    def _done(self, work: Waiting, start: float) -> bool:
        try:
            work.wait(SLICE)
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait(SLICE)  # completed: says at once whether it failed, or was done just after the slice's end
            return True
        except RuntimeError as error:
            failure = first_line(error)
        raise self._judged(start, failure)

    def _meet(self) -> None:
        """Learn who the peers are. Those that have come to a first collective have all said it before."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        keys = [f"peer/{rank}" for rank in others]
        texts = self._store.multi_get(keys) if self._store.check(keys) else map(self._said, keys)
        for rank, text in zip(others, texts, strict=True):
            peer = Peer.absent(rank, self._world[rank]) if text is None else Peer.from_json(text)
            self._peers[rank] = (peer, peer.open())
        if any(view is None for _, view in self._peers.values()):
            self._watch = Watch(self._store, self.rank, self.size, self._slate.view())
            self._watches.append(self._watch)
        self._met = True

    def _said(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    def _try_to_meet(self) -> None:
        try:
            self._meet()
        except Exception as error:  # whatever the store raises
            self._store_error = first_line(error)

    def _known(self) -> Cause | None:
        """The first cause, if some rank has found it."""
        if self._cause is None:
            texts = [peer.left if view is None else view.note() for peer, view in self._peers.copy().values()]
            texts += [self._watch.cause] if self._watch is not None else []
            self._cause = next(filter(None, map(Cause.in_note, texts)), None)
        return self._cause

    def _raise_known(self, start: float) -> None:
        if (cause := self._known()) is not None:
            raise cause.error(self._waited(start))

    def _judged(self, start: float, failure: str) -> TrimtabError:
        """The error to raise: a cause that is known by now, or this rank's own verdict, told to all."""
        first = not self._met
        if first:  # in a thread of its own, for the store may be as dead as the peer
            meeting = threading.Thread(target=self._try_to_meet, daemon=True)
            meeting.start()
            meeting.join(self.patience)
        unasked = self._watch is not None and not self._watch.asking  # met just now, or failed before its deadline
        if unasked and self._watch is not None:
            self._watch.ask()
        # A process that dies closes its connections a moment before it is seen to be gone.
        end = time.monotonic() + (self.patience if failure or unasked else 0.0)
        while self._known() is None and time.monotonic() < end:
            answers = self._answers()
            if any(a.left or a.process == "gone" for a in answers):
                break
            if not failure and self._watch is not None and (self._watch.store_error or all(a.heard for a in answers)):
                break
            time.sleep(0.02)
        if self._known() is None:
            here = self.place() or Place(layer="", phase="count", direction="forward", call=0)
            answers, dead = self._answers(), self._dead_store()
            self._publish(judge(answers, here, self.deadline, failure, dead, first=self._transport if first else None))
        cause = self._known()
        assert cause is not None
        return cause.error(self._waited(start))

    def _dead_store(self) -> DeadStore | None:
        """Why the others cannot be asked, if they cannot: a live store hands out this rank's own answer too."""
        if self._met and (self._watch is None or self.rank in self._watch.heard):
            return None
        error = self._watch.store_error if self._watch is not None else self._store_error
        return DeadStore(host=self._store_host, error=error or f"no answer within {self.patience:g} s")

    def _answers(self) -> list[Answer]:
        """What is known of the other ranks now."""
        answers = []
        for rank, (peer, view) in self._peers.copy().items():  # `_try_to_meet` may still be at it
            process = peer.state()
            if view is None:
                place, seconds = self._watch.heard.get(rank, (None, 0.0)) if self._watch else (None, 0.0)
                note = (self._watch.left.get(rank, "") if self._watch else "") or peer.left
                heard = self._watch is not None and rank in self._watch.heard
            else:
                place, note, heard = view.place(), view.note(), True
                seconds = seconds_at(place)
            left = "" if note.startswith("{") else note
            answers.append(Answer(peer=peer, process=process, heard=heard, place=place, seconds=seconds, left=left))
        return answers

    def _publish(self, cause: Cause) -> None:
        self._slate.write_note(cause.to_json())
        if self._watch is not None:
            self._watch.publish(cause.to_json())
            end = time.monotonic() + self.patience / 2
            while not self._watch.cause and not self._watch.store_error and time.monotonic() < end:
                time.sleep(0.01)
            if self._watch.cause:
                cause = Cause.from_json(self._watch.cause)
        self._cause = cause

    def _waited(self, start: float) -> str:
        place = self.place()
        return f"Rank {self.rank} was {place} ({time.monotonic() - start:.1f} s)."


def _leave(slate: Slate, pid: int, watches: list[Watch], unopened: list[tuple[LastWords, str, Peer]]) -> None:
    """The guard or its process ends: say so in the record, and stop the thread. A record that nobody has opened ends
    with the process, so its note goes to the store."""
    if os.getpid() != pid:  # a forked child shares the memory, but it is not the rank
        return
    error = getattr(sys, "last_value", None)
    why = "" if error is None else f"it ended with {type(error).__name__}: {error}"
    if not slate.view().note():
        slate.write_note(why or "it ended its program or gave up its transport")
    for words, prefix, me in unopened:
        words.say(prefix, replace(me, left=slate.view().note()))
    for watch in watches:
        watch.stop(why)
    slate.close()
