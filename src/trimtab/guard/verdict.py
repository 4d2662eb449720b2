"""Judges who broke: from what is seen of each rank to one sentence, which all ranks of the host raise. All is pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from trimtab.errors import BackendError, ConfigError, DesyncError, InputError, PeerLost, PhaseTimeout, TrimtabError
from trimtab.guard.peers import PeerInfo
from trimtab.guard.record import Place

_KINDS: dict[str, type[TrimtabError]] = {
    kind.__name__: kind for kind in (PeerLost, PhaseTimeout, DesyncError, InputError, ConfigError, BackendError)
}
_MOST_TEXT, _MOST_RANKS, _NAMED = 4_000, 1_000, 8
"""Characters and ranks of a verdict at most, so that it fits a record; and ranks that it says a sentence of."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank as another sees it.

    process: running, stopped or gone, as the host says; unknown on another host. place: where its record says it is.
    left: why it has left the group, or that it has; empty if it has not.
    """

    peer: PeerInfo
    process: str = "unknown"
    place: Place | None = None
    left: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The first cause of a failure: what every rank of the host raises."""

    kind: str
    message: str
    ranks: tuple[int, ...] = ()
    layer: str = ""
    phase: str = ""

    @classmethod
    def of(cls, error: TrimtabError) -> Verdict:
        """An error that one rank raised, for the others to raise too."""
        kind = type(error).__name__
        text = error.message if len(error.message) <= _MOST_TEXT else f"{error.message[:_MOST_TEXT]} […]"
        return cls(
            kind=kind if kind in _KINDS else "DesyncError", message=text, ranks=error.ranks[:_MOST_RANKS],
            layer=error.layer or "", phase=error.phase or "",
        )  # fmt: skip

    def to_note(self) -> str:
        """Text for a rank's record."""
        return json.dumps(asdict(self))

    @classmethod
    def in_note(cls, note: str) -> Verdict | None:
        """The verdict in a rank's record; None where there is none, or it is being written."""
        try:
            values = json.loads(note) if note.startswith("{") else None
        except ValueError:
            return None
        return None if values is None else cls(**{**values, "ranks": tuple(values["ranks"])})

    def error(self, waited: str) -> TrimtabError:
        """`waited`: what this rank itself was doing."""
        return _KINDS[self.kind](
            f"{self.message} {waited}", ranks=self.ranks, layer=self.layer or None, phase=self.phase or None
        )


def in_the_world(error: TrimtabError, world: Sequence[int]) -> TrimtabError:
    """`error`, saying who those are that it counts, if it does not. world: the global ranks of its group."""
    if not error.ranks or "global rank" in error.message:
        return error
    who = ", ".join(f"rank {rank} is global rank {world[rank]}" for rank in error.ranks[:_NAMED])
    message = f"in the group where {who}: {error.message}"
    return type(error)(message, ranks=error.ranks, layer=error.layer, phase=error.phase)


def judge(
    seen: Sequence[Seen], waited: Place, deadline: float, failure: str = "", *, first: str | None = None
) -> Verdict:
    """Why this rank, which `waited` there, cannot go on. `seen`: the other ranks.

    failure: what the collective itself said, if it failed before the deadline. first: where this is the first that the
    ranks wait for together, this one's kind of transport: a rank with another kind waits somewhere else.
    """
    if gone := [s for s in seen if s.process == "gone" and not s.left]:
        said = [f"{s.peer} is gone: its process has ended{_last(s)}." for s in gone]
        return _verdict(PeerLost, gone, waited, said, "Look at its log and at the kernel's (out of memory?).")
    if left := [s for s in seen if s.left]:
        return _verdict(PeerLost, left, waited, [f"{s.peer} has left the group: {s.left}{_last(s)}." for s in left])
    if absent := [s for s in seen if not s.peer.pid]:
        said = [f"{s.peer} has not built its transport: it ended, or is busy, before its first layer." for s in absent]
        return _verdict(PeerLost if failure else PhaseTimeout, absent, waited, said)
    if stopped := [s for s in seen if s.process == "stopped"]:
        said = [f"{s.peer} is frozen: the process is stopped (SIGSTOP or a debugger){_last(s)}." for s in stopped]
        return _verdict(PeerLost, stopped, waited, said)
    if others := [s for s in seen if first and s.peer.transport not in ("", first)]:
        said = [f"{s.peer} exchanges by {s.peer.transport}, others by {first}: they never meet." for s in others]
        return _verdict(DesyncError, others, waited, said, "Give every rank of a group the same transport.")
    if not failure and (elsewhere := [s for s in seen if s.peer.is_local and not _waits_at(s, waited)]):
        advice = f"Nobody came within the deadline of {deadline:g} s: look at what it does, or raise the deadline."
        return _verdict(PhaseTimeout, elsewhere, waited, [_alive(s) for s in elsewhere], advice)
    what = f"the connection broke ({failure})" if failure else f"nothing moved for {deadline:g} s"
    kind = PeerLost if failure else PhaseTimeout
    if remote := [s for s in seen if not s.peer.is_local]:
        said = [f"{what}, and all ranks of this host live: look at those of other hosts, by `trimtab doctor --places`:"]
        return _verdict(kind, remote, waited, [*said, *(f"{s.peer}." for s in remote)])
    return _verdict(kind, [], waited, [f"{what} while the processes of all ranks live: look at the network."])


def _verdict(
    kind: type[TrimtabError], guilty: Sequence[Seen], waited: Place, said: Sequence[str], advice: str = ""
) -> Verdict:
    place = next((s.place for s in guilty if s.place is not None), waited)
    more = [f"So it is with {len(said) - _NAMED} more."] if len(said) > _NAMED else []
    ranks = tuple(s.peer.rank for s in guilty)
    message = " ".join([*said[:_NAMED], *more, *([advice] if advice else [])])
    return Verdict.of(kind(message, ranks=ranks, layer=place.layer, phase=place.phase))


def _last(seen: Seen) -> str:
    return "" if seen.place is None else f"; it was last {seen.place}, since {seen.place.seconds:.1f} s"


def _waits_at(seen: Seen, waited: Place) -> bool:
    p = seen.place
    return (
        p is not None
        and p.state == "waiting in"
        and (p.layer, p.phase, p.direction, p.call) == (waited.layer, waited.phase, waited.direction, waited.call)
    )


def _alive(seen: Seen) -> str:
    if seen.place is None:
        return f"{seen.peer} is alive and has not begun its first call."
    return f"{seen.peer} is alive and {seen.place}, for {seen.place.seconds:.1f} s."
