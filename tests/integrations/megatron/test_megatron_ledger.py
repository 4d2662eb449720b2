"""Megatron's MoE layer with trimtab in it, against the dense truth: patterns by topologies by parts of ours."""

from __future__ import annotations

import pytest

from helpers.megatron_cpu import judged
from trimtab.verify.collect import Verdict
from trimtab.verify.patterns import PATTERNS

OURS = ("Trimtab", "TrimtabDispatcher", "TrimtabLinears", "TrimtabRouter")
"""Classes of peers.megatron_impl."""
TOPOLOGIES = (
    "1r-local", "2r-ep2", "4r-ep4", "4r-ep2-etp2", "4r-ep2-etp2-tp2-sharded", "4r-ep4-tp2-sharded", "4r-etp4-local",
)  # fmt: skip
NOT_ASKED = {"ties", "bad_id"}
"""Megatron's router leaves open which of equal scores is chosen, and its map of tokens by experts holds no ids."""
EDGES = ("random", "cold_rank", "empty_source", "empty_world", "masked", "all_dropped", "ragged", "nan_logits")


def test_megatrons_own_is_right_where_tokens_are_even() -> None:
    _all_right(judged("Impl", ["2r-ep2"], ["random", "alternating"], ["float32", "float64"]))


@pytest.mark.parametrize("ours", OURS)
def test_edges_are_right(ours: str) -> None:
    _all_right(judged(ours, ["2r-ep2"], EDGES))


def test_edges_are_right_in_each_topology() -> None:
    for ours in OURS[:2]:
        _all_right(judged(ours, TOPOLOGIES[3:5], ["random", "empty_source", "uneven_shards"]))


@pytest.mark.megatron_full
@pytest.mark.parametrize("ours", OURS)
def test_every_pattern_is_right_in_every_topology(ours: str) -> None:
    patterns = [pattern.name for pattern in PATTERNS if pattern.name not in NOT_ASKED]
    verdicts = judged(ours, TOPOLOGIES, patterns, ["float32", "float64", "bfloat16"])
    _all_right(verdicts)
    for dtype in ("float32", "float64"):
        errors = [max(v.errors.values(), default=0.0) for v in verdicts if v.case.dtype == dtype]
        print(f"{ours}: {len(errors)} cases in {dtype}, largest error {max(errors):.1e}")


def _all_right(verdicts: list[Verdict]) -> None:
    wrong = [f"{v.case.name}: {v.status}: {'; '.join(v.details)}" for v in verdicts if v.status != "ok"]
    assert not wrong, "\n".join(wrong)
