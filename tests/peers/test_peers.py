"""The cheap half of the ledger of peers: what needs nothing but transformers, and how failures are told apart."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.distributed import DistributedConfig

from peers import page
from peers.failures import FAILURES, failure_named
from peers.judge import Judged, Result, cases_of, judge, judged
from peers.registry import OURS_ALONE, ROOT, SOURCES, peer_named, peers
from peers.reproduce import run_all, run_here
from trimtab.errors import ConfigError
from trimtab.verify.cases import Case
from trimtab.verify.collect import Verdict
from trimtab.verify.implementation import get_implementation, home_of
from trimtab.verify.patterns import pattern_named
from trimtab.verify.run import run_local
from trimtab.verify.topologies import Topology, default_topologies, topology_named

GROUPED, EAGER = (get_implementation(f"peers.transformers_impl:{name}") for name in ("Impl", "Eager"))
RANDOM = pattern_named("random")


def case(name: str) -> Case:
    topology, pattern, dtype = name.split("/")
    return Case(topology=topology_named(topology), pattern=pattern_named(pattern), dtype=dtype, seed=0)


def test_transformers_holds_the_truth_on_two_ranks() -> None:
    names = (
        "2r-ep2/random/float32", "2r-ep2/one_expert/bfloat16", "2r-ep2/lone_rank/float32",
        "2r-ep2/empty_source/float32", "2r-ep2/empty_world/float32", "2r-ep2/cold_rank/float32",
        "2r-ep2/duplicates/float32",  # no top-k makes these: the replayed ids were used
        "2r-ep2/alternating/float32", "2r-ep2-fsdp/ragged/float32", "2r-ep2-fsdp/replayed/float32",
        "2r-ep2-tp2-replicated/prime/float32", "2r-ep2-tp2-replicated/one_token/float32", "2r-fsdp-local/zipf1/float32",
        "2r-ddp-local/ragged/float32", "2r-ddp-local/empty_source/float32",
    )  # fmt: skip
    verdicts = {v.case.name: v for v in run_local(list(map(case, names)), "peers.transformers_impl:Impl", deadline=60)}
    assert {name: (v.status, v.details) for name, v in verdicts.items()} == {name: ("ok", []) for name in names}
    assert all(v.errors.keys() == {"y", "dx", "d router", "d up", "d down"} for v in verdicts.values())
    assert all(error > 0 for error in verdicts["2r-ep2/random/float32"].errors.values())  # another code's rounding


def test_optimizers_over_transformers_layers_hold_the_truth() -> None:
    names = [f"{t}/random/float32" for t in ("2r-fsdp-local-adamw", "2r-ep2-adamw", "2r-ep2-muon", "2r-ep2-fsdp-muon")]
    for verdict in run_local(list(map(case, names)), "peers.transformers_impl:Impl", deadline=60):
        assert (verdict.status, verdict.details) == ("ok", []), verdict.case.name
        assert verdict.errors.keys() > {"new router", "new up", "new down"}


def test_a_loop_takes_any_width_and_crashes_without_tokens() -> None:
    """The latter is known, and seen outside of the ledger too."""
    eager, failure = peer_named("transformers-eager"), failure_named("transformers-eager-no-tokens")
    asked = cases_of(eager, ("2r-ep2",), ("zipf2", "cold_rank", "empty_source"))
    asked += cases_of(eager, ("1r-local",), ("empty_source",))
    *right, crash = sorted(judge(eager, asked), key=lambda found: found.status == "crashed")
    assert {found.status for found in right} == {"right"}
    assert (crash.topology, crash.status) == ("1r-local", "crashed")
    assert [known for known in FAILURES if known.explains(eager, crash)] == [failure]
    (found,) = run_all([(failure, False)])
    assert failure.missed(found) == []
    assert failure.missed(["ends"]) == [f"rank 0: expected {failure.expected[0]!r}, found 'ends'"]


LACKS = {
    "2r-ep2-tp2-sharded/random": "sequence-sharded", "2r-ep2-allgather/random": "transport allgather",
    "2r-ep2-ordered/random": "ordered combine", "2r-ep2-ddp/random": "DDP", "4r-ep2-hsdp/random": "HSDP",
    "2r-ep2-cp2/random": "context-parallel", "2r-ep2/zipf2": "16 bytes", "2r-ep2/masked": "token mask",
    "2r-ep2/all_masked": "token mask", "2r-ep2/dropped": "dropped slots", "2r-ep2/all_dropped": "dropped slots",
    "2r-ep2/bad_id": "out of range", "2r-ep2/nan_logits": "NaN", "2r-ep2/ties": "equal scores",
}  # fmt: skip


@pytest.mark.parametrize("name", LACKS)
def test_transformers_says_what_it_lacks(name: str) -> None:
    asked = case(f"{name}/float32")
    assert LACKS[name] in str(GROUPED.lacks(asked.topology, asked.pattern))


def test_transformers_is_asked_for_what_its_configuration_takes() -> None:
    wide_tp = replace(topology_named("4r-ep2-tp4-replicated-ordered"), combine="sum")
    assert "multiple of tp_size" in str(GROUPED.lacks(wide_tp, RANDOM))
    with pytest.raises(ValueError, match="multiple of `tp_size`"):
        DistributedConfig(ep_size=wide_tp.ep, tp_size=wide_tp.tp, fsdp_size=wide_tp.dp)
    assert "etp" in str(GROUPED.lacks(Topology(ranks=4, ep=2, etp=2), RANDOM))
    assert EAGER.lacks(topology_named("2r-ep2"), pattern_named("zipf2")) is None
    asked = [t for t in default_topologies() if GROUPED.lacks(t, RANDOM) is None]
    assert {t.name for t in asked} >= {"1r-local", "2r-ep2", "3r-ep3-tp3-replicated-fsdp", "4r-ep2-fsdp", "8r-ep8"}
    for t in asked:
        DistributedConfig(ep_size=t.ep, tp_size=t.tp, fsdp_size=t.dp, ep_implementation="all_to_all")


@pytest.mark.parametrize(
    ("name", "needed"),
    [("transformers", "transformers.distributed"), ("torchtitan", "torchtitan.distributed.spmd_types")],
)
def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch, name: str, needed: str) -> None:
    monkeypatch.setitem(sys.modules, needed, None)
    monkeypatch.delitem(sys.modules, f"peers.{name}_impl", raising=False)
    with pytest.raises(ConfigError, match=f"^--impl peers.{name}_impl:Impl can't be judged here: .*{name}.*"):
        get_implementation(f"peers.{name}_impl:Impl")


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


def test_a_verdict_says_the_first_line_and_the_largest_difference() -> None:
    asked = case("2r-ep2/random/float32")
    crash = judged(
        Verdict(case=asked, status="error", details=["rank 1: ValueError: Traceback\n  line\nValueError: no"])
    )
    assert (crash.status, crash.said) == ("crashed", "ValueError: no")
    wrong = judged(Verdict(case=asked, status="mismatch", errors={"y": 1e-3, "dx": 0.5}, details=["rank 0: y: got 1"]))
    assert (wrong.status, wrong.error, wrong.said) == ("wrong", 0.5, "dx by 5.0e-01")
    assert judged(Verdict(case=asked, status="hang", details=["rank(s) 0: no answer within 20 s"])).status == "hung"


def test_every_peer_is_named_once_has_a_source_and_is_asked_what_it_promised() -> None:
    assert len({peer.name for peer in peers()}) == len(list(peers()))
    for peer in peers():
        assert set(peer.folders) <= SOURCES.keys()
        module, name = home_of(peer.impl)
        source = Path(str(ROOT.parent / "tests" / module.replace(".", "/")) + ".py")
        assert f"class {name}" in source.read_text(encoding="utf-8")
        assert not {case.pattern.name for case in cases_of(peer)} & set(OURS_ALONE)


def test_a_page_shows_marks_and_what_nothing_explains() -> None:
    result = Result(peer="transformers", version="5", cases=[
        Judged(topology="2r-ep2", pattern="random", status="right", error=1e-7),
        Judged(topology="2r-ep2", pattern="ragged", status="crashed", said="RuntimeError: new"),
    ])  # fmt: skip
    assert re.search(r"2r-ep2  \. +C", page.table(result))
    by_failure, unknown = page.explained({"transformers": result})
    assert not any(by_failure.values())
    assert [case.said for _, case in unknown] == ["RuntimeError: new"]
