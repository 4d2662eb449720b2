"""transformers as a peer: right on two ranks, asked for what its configuration takes, and missing in one sentence."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from transformers.distributed import DistributedConfig

from trimtab.errors import ConfigError
from trimtab.verify.cases import Case
from trimtab.verify.implementation import Implementation, get_implementation
from trimtab.verify.patterns import pattern_named
from trimtab.verify.run import run_local
from trimtab.verify.topologies import Topology, default_topologies

GROUPED, EAGER = "peers.transformers_impl:Impl", "peers.transformers_impl:Eager"
BY_NAME = {topology.name: topology for topology in default_topologies()}


@pytest.fixture(scope="module")
def transformers() -> Implementation:
    return get_implementation(GROUPED)


def case(name: str) -> Case:
    """The case of that name."""
    topology, pattern, dtype = name.split("/")
    return Case(topology=BY_NAME[topology], pattern=pattern_named(pattern), dtype=dtype, seed=0)


def test_transformers_holds_the_truth_on_two_ranks() -> None:
    names = (
        "2r-ep2/random/float32",
        "2r-ep2/one_expert/bfloat16",
        "2r-ep2/lone_rank/float32",
        "2r-ep2/empty_source/float32",
        "2r-ep2/empty_world/float32",
        "2r-ep2/duplicates/float32",  # no top-k makes these: the replayed ids were used
        "2r-ep2/alternating/float32",
        "2r-ep2-fsdp/ragged/float32",
        "2r-ep2-fsdp/replayed/float32",
        "2r-ep2-tp2-replicated/prime/float32",
        "2r-ep2-tp2-replicated/one_token/float32",
        "2r-fsdp-local/zipf1/float32",
        "2r-ddp-local/ragged/float32",
    )
    verdicts = {v.case.name: v for v in run_local([case(name) for name in names], GROUPED, deadline=60)}
    assert {name: (v.status, v.details) for name, v in verdicts.items()} == {name: ("ok", []) for name in names}
    assert all(v.errors.keys() == {"y", "dx", "d router", "d up", "d down"} for v in verdicts.values())
    assert all(error > 0 for error in verdicts["2r-ep2/random/float32"].errors.values())  # another code's rounding


@pytest.mark.parametrize(
    ("topology", "pattern", "reason"),
    [
        ("2r-ep2-tp2-sharded", "random", "sequence-sharded"),
        ("2r-ep2-allgather", "random", "transport allgather"),
        ("2r-ep2-ordered", "random", "ordered combine"),
        ("2r-ep2-ddp", "random", "DDP"),
        ("4r-ep2-hsdp", "random", "HSDP"),
        ("2r-ep2-cp2", "random", "context-parallel"),
        ("2r-ep2", "zipf2", "16 bytes"),
        ("2r-ep2", "masked", "token mask"),
        ("2r-ep2", "all_masked", "token mask"),
        ("2r-ep2", "dropped", "dropped slots"),
        ("2r-ep2", "all_dropped", "dropped slots"),
        ("2r-ep2", "bad_id", "out of range"),
        ("2r-ep2", "nan_logits", "NaN"),
        ("2r-ep2", "ties", "equal scores"),
    ],
)
def test_transformers_says_what_it_lacks(
    transformers: Implementation, topology: str, pattern: str, reason: str
) -> None:
    said = transformers.lacks(BY_NAME[topology], pattern_named(pattern))
    assert said is not None
    assert reason in said


def test_transformers_experts_in_a_loop_take_any_width() -> None:
    (verdict,) = run_local([case("2r-ep2/zipf2/float32")], EAGER, deadline=60)
    assert (verdict.status, verdict.details) == ("ok", [])


def test_transformers_lacks_what_its_configuration_refuses(transformers: Implementation) -> None:
    wide_tp = replace(BY_NAME["4r-ep2-tp4-replicated-ordered"], combine="sum")
    assert "multiple of tp_size" in str(transformers.lacks(wide_tp, pattern_named("random")))
    with pytest.raises(ValueError, match="multiple of `tp_size`"):
        DistributedConfig(ep_size=wide_tp.ep, tp_size=wide_tp.tp, fsdp_size=wide_tp.dp)
    assert "etp" in str(transformers.lacks(Topology(ranks=4, ep=2, etp=2), pattern_named("random")))


def test_transformers_is_asked_for_what_its_configuration_takes(transformers: Implementation) -> None:
    asked = [t for t in default_topologies() if transformers.lacks(t, pattern_named("random")) is None]
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
