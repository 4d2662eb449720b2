"""Rows of the ledger, every pattern of each: outputs, gradients and loads are those of the truth over all ranks.

What else a layer is put through on ranks and is told by name is a word of a row, see `trimtab.verify.topologies`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trimtab.verify.cases import Case
from trimtab.verify.patterns import PATTERNS, pattern_named
from trimtab.verify.run import run_local
from trimtab.verify.topologies import topology_named

RANKS4 = pytest.mark.xdist_group("ranks4")
ROWS = {
    "one rank": "1r-local-ordered 1r-local-twolora 1r-local-maingrad-delayed 1r-local-nf4-lora 1r-local-replicas",
    "transports": "2r-ep2 2r-ep2-ordered 2r-ep2-allgather 2r-ep2-allgather-ordered 2r-ep2-sharedmemory "
    "2r-ep2-sharedmemory-ordered",
    "weights": "2r-ep2-fsdp-nf4-lora 2r-etp2-local-nf4-sharedlora 2r-ep2-mergedlora 2r-ep2-sharedlora-reentrant "
    "2r-ddp-local-int8-lora 2r-fsdp-local-nf4-twolora 2r-etp2-local-int8-lora",
    "sinks": "2r-ep2-ddp-maingrad-delayed 2r-etp2-local-maingrad 2r-ep2-fsdp-delayed 2r-ep2-maingrad "
    "2r-ep2-ddp-nf4-lora-maingrad-delayed 2r-ep2-fsdp-sharedlora-delayed 2r-ep2-nf4-delayed "
    "2r-ep2-tp2-sharded-delayed",
    "panels": "2r-ep2-fsdp-panels-lora 2r-ep2-ordered-panels-sharedlora-replicas-reentrant",  # they hold no float64
    "replicas": "2r-ep2-replicas 2r-ep2-ordered-replicas-recomputed 2r-ep2-allgather-autoreplicas-rerouted "
    "2r-ep2-sharedmemory-ordered-replicas-reentrant 2r-ep2-replicas-recomputed-maingrad",
    "replicas of any weights": "2r-ep2-lora-replicas-recomputed 2r-ep2-nf4-replicas 2r-ep2-nf4-twolora-replicas "
    "2r-ep2-replicas-frozen 2r-ep2-sharedmemory-replicas-recomputed-downalone",
}
FOUR = {
    "transports": "4r-ep4 4r-ep4-allgather-ordered 4r-ep4-sharedmemory 4r-ep2-cp2-tp2-sharded-ddp",
    "weights and sinks": "4r-ep2-hsdp-sharedlora 4r-ep2-etp2-fsdp-nf4-lora 4r-ep2-etp2-ddp-maingrad",
    "replicas": "4r-ep4-allgather-ordered-replicas 4r-ep4-sharedmemory-replicas-recomputed "
    "4r-ep2-etp2-nf4-sharedlora-replicas-recomputed 4r-ep2-fsdp-lora-replicas-recomputed",
}
F64 = ("float64",)
SOME = (
    "random", "one_expert", "one_rank", "lone_rank", "empty_source", "empty_world", "masked", "one_token", "zipf2",
    "top_all", "dropped", "duplicates", "uneven_shards", "alternating", "bad_id",
)  # fmt: skip


def check(rows: Sequence[str], dtypes: Sequence[str], patterns: Sequence[str] = ()) -> None:
    chosen = [pattern_named(name) for name in patterns] or PATTERNS
    cases = [
        Case(topology=topology_named(row), pattern=pattern, dtype=dtype, seed=0)
        for row in rows
        for dtype in dtypes
        for pattern in chosen
    ]
    verdicts = list(run_local(cases, "trimtab", deadline=100.0))
    assert [f"{v.case.name}: {v.details[:1]}" for v in verdicts if v.status != "ok"] == []
    assert len(verdicts) == len(cases)
    made = {v.case.topology for v in verdicts if v.replicas}
    assert made == {v.case.topology for v in verdicts if v.case.topology.replicas != "none" and v.case.topology.ep > 1}


@pytest.mark.parametrize("rows", ROWS)
def test_rows(rows: str) -> None:
    check(ROWS[rows].split(), {"transports": ("float64", "float32", "bfloat16"), "panels": ("float32",)}.get(rows, F64))


@RANKS4
@pytest.mark.parametrize("rows", FOUR)
def test_rows_of_four_ranks(rows: str) -> None:
    check(FOUR[rows].split(), F64, SOME)


def test_a_compiled_row() -> None:
    check(("2r-ep2-ordered-lora-replicas-compiled",), F64, ("one_rank",))
