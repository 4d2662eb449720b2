"""Who broke: from what is known of each rank to one sentence. Pure functions of answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from trimtab.errors import BackendError, ConfigError, DesyncError, InputError, PeerLost, PhaseTimeout, TrimtabError
from trimtab.guard.peers import Peer
from trimtab.guard.place import Place

_KINDS: dict[str, type[TrimtabError]] = {
    kind.__name__: kind for kind in (PeerLost, PhaseTimeout, DesyncError, InputError, ConfigError, BackendError)
}


MOST_TEXT, MOST_RANKS, NAMED = 4_000, 1_000, 8
"""Characters and ranks of a cause, at most, so that it goes into a record; and ranks that it says a sentence of."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is known of one rank.

    process: running, stopped or gone, as the host says; unknown on another host.
    heard: it gave its place when asked, or the place was read in its memory.
    seconds: how long it has been at its place.
    left: why it has left the group, or that it has; empty if it has not.
    """

    peer: Peer
    process: str = "unknown"
    heard: bool = False
    place: Place | None = None
    seconds: float = 0.0
    left: str = ""


@dataclass(frozen=True, kw_only=True)
class DeadStore:
    """The store does not answer. host: the rank that serves it, if a rank does."""

    host: int | None
    error: str


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The first cause of a failure: what every rank of the group raises."""

    kind: str
    message: str
    ranks: tuple[int, ...]
    layer: str
    phase: str

    def to_json(self) -> str:
        """Text that a rank's record holds whole."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Cause:
        values = json.loads(text)
        return cls(**{**values, "ranks": tuple(values["ranks"])})

    @classmethod
    def in_note(cls, note: str) -> Cause | None:
        """What a rank's record says, if it is a cause and not in the middle of being written."""
        try:
            return cls.from_json(note) if note.startswith("{") else None
        except ValueError:
            return None

    def __post_init__(self) -> None:
        if len(self.message) > MOST_TEXT:
            object.__setattr__(self, "message", f"{self.message[:MOST_TEXT]} […]")
        object.__setattr__(self, "ranks", self.ranks[:MOST_RANKS])

    @classmethod
    def of(cls, error: TrimtabError) -> Cause:
        """An error that one rank raised, for the others to raise too."""
        kind = type(error).__name__
        return cls(
            kind=kind if kind in _KINDS else "DesyncError",
            message=error.message,
            ranks=error.ranks,
            layer=error.layer or "",
            phase=error.phase or "",
        )

    def error(self, waited: str) -> TrimtabError:
        """`waited`: what this rank itself was doing."""
        return _KINDS[self.kind](
            f"{self.message} {waited}", ranks=self.ranks, layer=self.layer or None, phase=self.phase or None
        )


def _each(sentences: Sequence[str]) -> list[str]:
    """Those of the first few ranks, and how many more there are."""
    more = len(sentences) - NAMED
    return [*sentences[:NAMED], *([f"So it is with {more} more."] if more > 0 else [])]


def _where(answer: Answer) -> str:
    if answer.place is None:
        return ""
    return f"; it was last {answer.place}, since {answer.seconds:.1f} s"


def _cause(kind: type[TrimtabError], guilty: Sequence[Answer], fallback: Place, what: Sequence[str]) -> Cause:
    place = next((a.place for a in guilty if a.place is not None), fallback)
    return Cause(
        kind=kind.__name__,
        message=" ".join(what),
        ranks=tuple(a.peer.rank for a in guilty),
        layer=place.layer,
        phase=place.phase,
    )


def judge(
    answers: Sequence[Answer], waited: Place, deadline: float, failure: str = "", store: DeadStore | None = None,
    *, first: str | None = None,
) -> Cause:  # fmt: skip
    """The cause why this rank, which `waited` there, cannot go on. `answers`: of the other ranks.

    failure: what the collective itself said, if it failed before the deadline. store: given if it does not answer.
    first: where this is the first that the ranks wait for together, this one's kind of transport: a rank that has not
        come there answers nobody, and one with another kind waits somewhere else.
    """
    gone = [a for a in answers if a.process == "gone" and not a.left]
    if gone:
        what = _each([f"{a.peer} is gone: its process has ended without a word{_where(a)}." for a in gone])
        return _cause(PeerLost, gone, waited, [*what, "Look at its log and at the kernel's (out of memory?)."])
    left = [a for a in answers if a.left]
    if left:
        what = _each([f"{a.peer} has left the group: {a.left}{_where(a)}." for a in left])
        return _cause(PeerLost, left, waited, what)
    absent = [a for a in answers if a.peer.is_absent]
    if absent:
        what = [f"{a.peer} has not built its transport: it ended, or is busy, before its first layer." for a in absent]
        what = _each(what)
        return _cause(PeerLost if failure else PhaseTimeout, absent, waited, what)
    stopped = [a for a in answers if a.process == "stopped"]
    if stopped:
        what = [f"{a.peer} is frozen: the process is stopped (SIGSTOP or a debugger){_where(a)}." for a in stopped]
        return _cause(PeerLost, stopped, waited, _each(what))
    others = [a for a in answers if first and a.peer.transport and a.peer.transport != first]
    if others:
        what = [f"{a.peer} exchanges by {a.peer.transport}, others by {first}: they never meet." for a in others]
        return _cause(DesyncError, others, waited, [*_each(what), "Give every rank of a group the same transport."])
    if store is not None:
        host = [a for a in answers if a.peer.rank == store.host]
        who = str(host[0].peer) if host else f"rank {store.host}"
        by = "" if store.host is None else f" {who} serves it: dead, frozen or cut off."
        message = f"the store does not answer ({store.error}), so no rank can be asked where it is.{by} {failure}"
        named = () if store.host is None else (store.host,)
        return Cause(kind="PeerLost", message=message.strip(), ranks=named, layer=waited.layer, phase=waited.phase)
    silent = [a for a in answers if not a.heard]
    if silent:
        if first is not None and not failure:
            which = "it has" if len(silent) == 1 else "at least one of them has"
            who = ", ".join(str(a.peer) for a in silent[:NAMED])
            who += f" and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
            what = [
                f"{who}: {which} not come to its first call, or is dead, frozen or cut off from the store. Nothing is "
                "known of a rank of another host before its first exchange."
            ]
            return _cause(PhaseTimeout, silent, waited, what)
        what = [f"{a.peer} does not answer: dead, frozen or cut off from the store." for a in silent]
        return _cause(PeerLost, silent, waited, _each(what))
    if failure:
        message = f"the connection to a peer broke while the processes of all ranks live on ({failure})."
        return _cause(PeerLost, [], waited, [message, "Look at the network between the hosts."])
    elsewhere = [a for a in answers if a.place is None or not _same(a.place, waited)]
    if elsewhere:
        what = [_elsewhere(a) for a in elsewhere]
        advice = f"Nobody came within the deadline of {deadline:g} s: look at what it does, or raise the deadline."
        return _cause(PhaseTimeout, elsewhere, waited, [*_each(what), advice])
    message = f"all ranks wait in the same collective and nothing moved for {deadline:g} s: look at the network."
    return _cause(PhaseTimeout, [], waited, [message])


def _same(place: Place, waited: Place) -> bool:
    return place.state == "waiting in" and (place.layer, place.phase, place.direction, place.call) == (
        waited.layer, waited.phase, waited.direction, waited.call
    )  # fmt: skip


def _elsewhere(answer: Answer) -> str:
    if answer.place is None:
        return f"{answer.peer} is alive and has not begun its first call."
    return f"{answer.peer} is alive and {answer.place}, for {answer.seconds:.1f} s."


def seconds_at(place: Place | None) -> float:
    """How long a rank of this host has been at its place."""
    return 0.0 if place is None else time.monotonic() - place.since
