"""The cheap half of the ledger of peers: what needs nothing but transformers, and how failures are told apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peers import page
from peers.failures import FAILURES
from peers.fetch import ROOT
from peers.judge import Judged, Result, cases_of, judge, judged
from peers.registry import OURS_ALONE, SOURCES, peer_named, peers
from peers.reproduce import run_all, run_here
from trimtab.verify.cases import Case
from trimtab.verify.collect import Verdict
from trimtab.verify.implementation import home_of
from trimtab.verify.patterns import pattern_named
from trimtab.verify.topologies import topology_named


def test_transformers_is_right_but_for_eager_experts_without_tokens() -> None:
    patterns = ("random", "cold_rank", "empty_source", "one_token")
    for name, topologies in (("transformers", ("2r-ep2", "2r-ddp-local")), ("transformers-eager", ("2r-ep2",))):
        peer = peer_named(name)
        assert {case.status for case in judge(peer, cases_of(peer, topologies, patterns))} == {"right"}
    eager = peer_named("transformers-eager")
    (case,) = judge(eager, cases_of(eager, ("1r-local",), ("empty_source",)))
    assert (case.status, case.rank) == ("crashed", 0)
    assert [failure.id for failure in FAILURES if failure.explains(eager, case)] == ["transformers-eager-no-tokens"]


def test_a_failure_is_seen_outside_of_the_ledger_too() -> None:
    (failure,) = (failure for failure in FAILURES if failure.id == "transformers-eager-no-tokens")
    (found,) = run_all([(failure.reproduction, False)])
    assert failure.reproduction.missed(found) == []
    assert failure.reproduction.missed(["ends"]) == [
        f"rank 0: expected {failure.reproduction.expected[0]!r}, found 'ends'"
    ]


def test_reproductions_tell_who_raised_died_waited_and_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.reproduce.PATIENCE", 4.0)
    lines = """
import os, time
if rank == 0:
    raise KeyError("a key")
if rank == 1:
    os.kill(os.getpid(), 9)
if rank == 2:
    said = 7
if rank == 3:
    time.sleep(60)
"""
    assert run_here({}, 4, lines) == ["KeyError: 'a key'", "dies: SIGKILL", "ends: 7", "waits for it"]
    assert run_here({}, 1, "import time; time.sleep(60)") == ["hangs: no end within 4 s"]


def test_a_verdict_says_the_first_line_its_rank_and_the_largest_difference() -> None:
    case = Case(topology=topology_named("2r-ep2"), pattern=pattern_named("random"), dtype="float32", seed=0)
    crash = judged(
        Verdict(case=case, status="error", details=["rank 1: ValueError: Traceback\n  line\nValueError: no"])
    )
    assert (crash.status, crash.rank, crash.said) == ("crashed", 1, "ValueError: no")
    wrong = judged(Verdict(case=case, status="mismatch", errors={"y": 1e-3, "dx": 0.5}, details=["rank 0: y: got 1"]))
    assert (wrong.status, wrong.error, wrong.said) == ("wrong", 0.5, "dx by 5.0e-01")
    hung = judged(Verdict(case=case, status="hang", details=["rank(s) 0: no answer within 20 s"]))
    assert (hung.status, hung.rank) == ("hung", None)


def test_every_peer_is_named_once_and_has_a_source() -> None:
    assert len({peer.name for peer in peers()}) == len(list(peers()))
    for peer in peers():
        assert set(peer.folders) <= SOURCES.keys()
        module, name = home_of(peer.impl)
        source = Path(str(ROOT.parent / "tests" / module.replace(".", "/")) + ".py")
        assert not peer.impl.startswith("peers.") or f"class {name}" in source.read_text(encoding="utf-8")


def test_a_page_shows_marks_and_what_nothing_explains() -> None:
    result = Result(peer="transformers", version="5", cases=[
        Judged(topology="2r-ep2", pattern="random", status="right", error=1e-7),
        Judged(topology="2r-ep2", pattern="ragged", status="crashed", said="RuntimeError: new"),
    ])  # fmt: skip
    assert re.search(r"2r-ep2  \. +C", page.table(result))
    by_failure, unknown = page.explained({"transformers": result})
    assert not any(by_failure.values())
    assert [case.said for _, case in unknown] == ["RuntimeError: new"]
    assert Result.of(result.as_dict()) == result


def test_what_peers_never_promised_is_not_asked() -> None:
    for peer in peers():
        assert not {case.pattern.name for case in cases_of(peer)} & set(OURS_ALONE)
