"""The verdict as a function of the answers: who is named, as what, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trimtab.errors import DesyncError, PeerLost, PhaseTimeout, TrimtabError
from trimtab.guard.judge import Answer, Cause, DeadStore, judge
from trimtab.guard.peers import Peer
from trimtab.guard.place import Place

HERE = Place(layer="layers.1", phase="combine", direction="forward", call=3, state="waiting in")
ELSEWHERE = Place(layer="layers.0", phase="experts", direction="backward", call=2)


def answer(rank: int, **known: Any) -> Answer:
    peer = Peer(rank=rank, global_rank=rank + 4, host="h", here="", pid=100 + rank, start=1, fd=3)
    return Answer(**{"peer": peer, "heard": True, "process": "running", "place": HERE, **known})


def verdict(*answers: Answer, **known: Any) -> Cause:
    return judge(answers, HERE, 30.0, **known)


@pytest.mark.parametrize(
    ("guilty", "kind", "says"),
    [
        ({"process": "gone", "place": ELSEWHERE}, PeerLost, "gone.*last in experts backward of layer layers.0, call 2"),
        ({"process": "gone", "left": "it ended with ValueError: x"}, PeerLost, "has left.*ValueError: x"),
        ({"process": "stopped", "place": ELSEWHERE, "seconds": 12.3}, PeerLost, "frozen.*since 12.3 s"),
        ({"process": "unknown", "heard": False, "place": None}, PeerLost, "does not answer"),
        ({"place": ELSEWHERE, "seconds": 12.3}, PhaseTimeout, "alive and in experts backward.*12.3 s.*deadline of 30"),
        ({"place": None}, PhaseTimeout, "has not begun"),
    ],
)
def test_the_guilty_rank_is_named_among_those_that_wait(
    guilty: dict[str, Any], kind: type[TrimtabError], says: str
) -> None:
    cause = verdict(answer(0), answer(2, **guilty), answer(3))
    assert cause.ranks == (2,)
    error = Cause.from_json(cause.to_json()).error("Rank 1 was there.")
    assert type(error) is kind
    assert error.ranks == (2,)
    assert error.rank == 2
    known = guilty.get("place", HERE) or HERE
    assert (error.layer, error.phase) == (known.layer, known.phase)
    with pytest.raises(kind, match=rf"(?s)rank 2 \(global rank 6, host h, pid 102\).*{says}.*Rank 1 was there"):
        raise error


def test_the_first_exchange_knows_late_ranks_and_other_transports() -> None:
    silent = answer(2, heard=False, place=None, process="unknown")
    late = verdict(answer(0), silent, first="")
    assert (late.kind, late.ranks) == ("PhaseTimeout", (2,))
    assert "(global rank 6, host h, pid 102): it has not come to its first call, or is dead" in late.message
    both = verdict(answer(0), silent, replace(silent, peer=answer(3).peer), first="")
    assert both.ranks == (2, 3)
    assert "at least one of them has not come to its first call" in both.message
    assert verdict(answer(0), silent, first="", failure="reset").kind == "PeerLost"
    assert "first call" not in verdict(answer(0), silent).message
    other = replace(answer(3), peer=replace(answer(3).peer, transport="AllGather"))
    same = replace(answer(0), peer=replace(answer(0).peer, transport="AllToAll"))
    cause = verdict(same, other, silent, first="AllToAll")
    assert (cause.kind, cause.ranks) == ("DesyncError", (3,))
    assert "exchanges by AllGather, others by AllToAll" in cause.message
    assert verdict(same, silent, first="AllToAll").ranks == (2,)
    assert verdict(same, other, first=None).kind == "PhaseTimeout"
    assert verdict(answer(1, process="gone"), other, first="AllToAll").kind == "PeerLost"


def test_the_dead_come_before_the_frozen_and_these_before_the_late() -> None:
    late, frozen = answer(0, place=ELSEWHERE), answer(2, process="stopped")
    left, gone = answer(3, left="it ended"), answer(4, process="gone")
    assert verdict(late, frozen, left, gone).ranks == (4,)
    assert verdict(late, frozen, left).ranks == (3,)
    assert verdict(late, frozen).ranks == (2,)
    assert verdict(late).ranks == (0,)


def test_a_rank_that_never_came_is_named_without_a_process() -> None:
    absent = Answer(peer=Peer.absent(2, 6))
    assert verdict(answer(0), absent).kind == "PhaseTimeout"
    cause = verdict(answer(0), absent, failure="closed", store=DeadStore(host=None, error="x"))
    assert (cause.kind, cause.ranks) == ("PeerLost", (2,))
    assert cause.message.startswith("rank 2 (global rank 6) has not built its transport")


def test_several_are_named() -> None:
    cause = verdict(answer(0, process="gone"), answer(2, process="gone"), answer(3))
    assert cause.ranks == (0, 2)
    assert cause.error("").rank is None
    assert "ranks 0, 2" in str(cause.error(""))


def test_nobody_is_blamed_for_the_network() -> None:
    cause = verdict(answer(0), answer(2))
    assert (cause.kind, cause.ranks) == ("PhaseTimeout", ())
    assert "network" in cause.message
    broken = verdict(answer(0), answer(2), failure="Connection reset")
    assert (broken.kind, broken.ranks) == ("PeerLost", ())
    assert "Connection reset" in broken.message


def test_a_dead_store_names_its_host_and_not_those_that_could_not_be_asked() -> None:
    silent = [answer(rank, heard=False, process="unknown", place=None) for rank in (0, 2)]
    served = verdict(*silent, store=DeadStore(host=0, error="reset"))
    assert served.ranks == (0,)
    assert "does not answer (reset)" in served.message
    assert "rank 0 (global rank 4, host h, pid 100) serves it" in served.message
    assert verdict(*silent, store=DeadStore(host=None, error="reset")).ranks == ()
    gone = verdict(answer(3, process="gone"), *silent, store=DeadStore(host=0, error="reset"))
    assert gone.ranks == (3,), "what this host shows needs no store"


def test_an_error_of_one_rank_is_raised_as_it_was_by_the_others() -> None:
    error = DesyncError("rank 0 will send 3 rows", ranks=(0, 2), layer="l", phase="combine")
    told = Cause.from_json(Cause.of(error).to_json()).error("Rank 1 waited.")
    assert type(told) is DesyncError
    assert (told.ranks, told.layer, told.phase) == ((0, 2), "l", "combine")
    assert str(told) == "[layer l, ranks 0, 2, phase combine] rank 0 will send 3 rows Rank 1 waited."
