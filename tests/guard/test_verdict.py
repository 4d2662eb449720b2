"""The verdict as a function of the answers: who is named, as what, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trimtab.errors import DesyncError, PeerLost, PhaseTimeout, TrimtabError
from trimtab.guard.peers import PeerInfo, _here
from trimtab.guard.record import Place
from trimtab.guard.verdict import Seen, Verdict, judge

HERE = Place(layer="layers.1", phase="combine", direction="forward", call=3, state="waiting in")
ELSEWHERE = Place(layer="layers.0", phase="experts", direction="backward", call=2)


def seen(rank: int, *, here: str | None = None, **known: Any) -> Seen:
    here = _here() if here is None else here
    peer = PeerInfo(rank=rank, global_rank=rank + 4, host="h", here=here, pid=100 + rank, start=1, record=3)
    return Seen(**{"peer": peer, "process": "running", "place": HERE, **known})


def remote(rank: int) -> Seen:
    return seen(rank, here="another", process="unknown", place=None)


def verdict(*others: Seen, **known: Any) -> Verdict:
    return judge(others, HERE, 30.0, **known)


def in_note(verdict: Verdict) -> Verdict:
    told = Verdict.in_note(verdict.to_note())
    assert told is not None
    return told


@pytest.mark.parametrize(
    ("guilty", "kind", "says"),
    [
        ({"process": "gone", "place": ELSEWHERE}, PeerLost, "gone.*last in experts backward of layer layers.0, call 2"),
        ({"process": "gone", "left": "it ended with ValueError: x"}, PeerLost, "has left.*ValueError: x"),
        ({"process": "stopped", "place": ELSEWHERE}, PeerLost, r"frozen.*since \d+\.\d s"),
        ({"place": ELSEWHERE}, PhaseTimeout, r"alive and in experts.*\d+\.\d s.*of 30"),
        ({"place": None}, PhaseTimeout, "has not begun"),
        ({"process": "unknown", "here": "x", "place": None}, PhaseTimeout, ""),
    ],
)
def test_the_guilty_rank_is_named_among_those_that_wait(
    guilty: dict[str, Any], kind: type[TrimtabError], says: str
) -> None:
    cause = verdict(seen(0), seen(2, **guilty), seen(3))
    assert cause.ranks == (2,)
    error = in_note(cause).error("Rank 1 was there.")
    assert type(error) is kind
    assert error.ranks == (2,)
    assert error.rank == 2
    known = guilty.get("place", HERE) or HERE
    assert (error.layer, error.phase) == (known.layer, known.phase)
    with pytest.raises(kind, match=rf"(?s)rank 2 \(global rank 6, host h, pid 102\).*{says}.*Rank 1 was there"):
        raise error


def test_the_first_exchange_knows_other_transports() -> None:
    other = seen(3, place=None)
    other = replace(other, peer=replace(other.peer, transport="AllGather"))
    same = replace(seen(0), peer=replace(seen(0).peer, transport="AllToAll"))
    cause = verdict(same, other, first="AllToAll")
    assert (cause.kind, cause.ranks) == ("DesyncError", (3,))
    assert "exchanges by AllGather, others by AllToAll" in cause.message
    assert verdict(same, other, first=None).kind == "PhaseTimeout"
    assert verdict(seen(1, process="gone"), other, first="AllToAll").kind == "PeerLost"


def test_ranks_of_other_hosts_are_named_where_nobody_here_is_at_fault() -> None:
    late = verdict(seen(0), remote(2), remote(3))
    assert (late.kind, late.ranks) == ("PhaseTimeout", (2, 3))
    assert "nothing moved for 30 s" in late.message
    broken = verdict(seen(0, place=ELSEWHERE), remote(2), failure="Connection reset")
    assert (broken.kind, broken.ranks) == ("PeerLost", (2,))
    assert "Connection reset" in broken.message
    assert verdict(seen(0, place=ELSEWHERE), remote(2)).ranks == (0,)


def test_the_dead_come_before_the_frozen_and_these_before_the_late() -> None:
    late, frozen = seen(0, place=ELSEWHERE), seen(2, process="stopped")
    left, gone = seen(3, left="it ended"), seen(4, process="gone")
    assert verdict(late, frozen, left, gone).ranks == (4,)
    assert verdict(late, frozen, left).ranks == (3,)
    assert verdict(late, frozen).ranks == (2,)
    assert verdict(late).ranks == (0,)


def test_a_rank_that_never_came_is_named_without_a_process() -> None:
    absent = Seen(peer=PeerInfo(rank=2, global_rank=6))
    assert verdict(seen(0), absent).kind == "PhaseTimeout"
    cause = verdict(seen(0), absent, failure="closed")
    assert (cause.kind, cause.ranks) == ("PeerLost", (2,))
    assert cause.message.startswith("rank 2 (global rank 6) has not built its transport")


def test_several_are_named() -> None:
    cause = verdict(seen(0, process="gone"), seen(2, process="gone"), seen(3))
    assert cause.ranks == (0, 2)
    assert cause.error("").rank is None
    assert "ranks 0, 2" in str(cause.error(""))


def test_nobody_is_blamed_for_the_network() -> None:
    cause = verdict(seen(0), seen(2))
    assert (cause.kind, cause.ranks) == ("PhaseTimeout", ())
    assert "network" in cause.message
    broken = verdict(seen(0), seen(2), failure="Connection reset")
    assert (broken.kind, broken.ranks) == ("PeerLost", ())
    assert "Connection reset" in broken.message


def test_an_error_of_one_rank_is_raised_as_it_was_by_the_others() -> None:
    error = DesyncError("rank 0 will send 3 rows", ranks=(0, 2), layer="l", phase="combine")
    told = in_note(Verdict.of(error)).error("Rank 1 waited.")
    assert type(told) is DesyncError
    assert (told.ranks, told.layer, told.phase) == ((0, 2), "l", "combine")
    assert str(told) == "[layer l, ranks 0, 2, phase combine] rank 0 will send 3 rows Rank 1 waited."
