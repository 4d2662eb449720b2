"""Real processes that are killed, frozen or derailed: what the others say, when, and that they end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from faults.cases import DESYNCS, PLACES, Fault, FaultResult, Outcome, fault_cases, problems_of
from faults.run import run_faults

BROKEN = [
    Fault(kind="kill", phase="count", layer=0, step=0),
    Fault(kind="kill", phase="route", direction="forward"),
    Fault(kind="kill", phase="experts", direction="backward", combine="ordered"),
    Fault(kind="kill", phase="combine", direction="forward", transport="allgather"),
    Fault(kind="kill", phase="experts", rank=0, store="tcp"),
    Fault(kind="freeze", phase="count", direction="forward", ranks=4, rank=2),
    Fault(kind="freeze", phase="dispatch", direction="backward"),
    Fault(kind="freeze", phase="experts"),
    Fault(kind="raise", phase="experts", direction="forward", ranks=2, rank=0),
    Fault(kind="stall", phase="experts", direction="forward"),
    Fault(kind="stall", phase="combine", direction="backward"),
    Fault(kind="delay", phase="experts", direction="forward"),
    Fault(kind="delay", phase="experts", direction="backward", store="tcp"),
]
SHARED = [
    Fault(kind="kill", phase="count", layer=0, step=0, transport="shared_memory"),
    Fault(kind="kill", phase="experts", direction="backward", transport="shared_memory"),
    Fault(kind="freeze", phase="dispatch", direction="backward", transport="shared_memory"),
    Fault(kind="raise", phase="combine", direction="forward", transport="shared_memory"),
    Fault(kind="stall", phase="experts", direction="forward", transport="shared_memory", combine="ordered"),
    Fault(kind="delay", phase="experts", direction="backward", transport="shared_memory"),
    Fault(kind="skip_combine", transport="shared_memory"),
    Fault(kind="wrong_splits", phase="combine", direction="backward", transport="shared_memory"),
]
DERAILED = [Fault(kind=kind) for kind in DESYNCS if kind != "wrong_splits"]
DERAILED += [Fault(kind="wrong_splits", phase=p, direction=d) for p, d in (PLACES[1], PLACES[4], PLACES[5], PLACES[7])]
DERAILED += [Fault(kind="skip_combine", transport="allgather"), Fault(kind="combine_rows"), Fault(kind="bad_shape")]
REPLICATED = [
    Fault(kind="kill", phase="route", replicated=True),
    Fault(kind="kill", phase="experts", replicated=True),
    Fault(kind="kill", phase="experts", direction="backward", replicated=True, transport="shared_memory"),
    Fault(kind="freeze", phase="experts", direction="backward", replicated=True),
    Fault(kind="stall", phase="experts", replicated=True, transport="shared_memory", combine="ordered"),
    Fault(kind="delay", phase="experts", direction="backward", replicated=True),
    Fault(kind="skip_layer", replicated=True),
    Fault(kind="kill", phase="experts", replicated=True, amid=True),
    Fault(kind="freeze", phase="experts", direction="backward", replicated=True, amid=True, transport="shared_memory"),
    Fault(kind="kill", phase="route", replicated=True, amid=True, transport="shared_memory"),
    Fault(kind="wrong_splits", phase="experts", replicated=True, transport="allgather"),
    Fault(kind="wrong_splits", phase="experts", direction="backward", replicated=True),
]


def check(cases: Sequence[Fault]) -> None:
    results = run_faults(cases, print, jobs=4, deadline=4.0, slack=8.0)
    assert [r.fault for r in results] == list(cases)
    assert not [str(r) for r in results if not r.good]


@pytest.mark.xdist_group("ranks4")
def test_a_rank_that_dies_freezes_or_stalls_is_named_with_its_phase_by_all_others() -> None:
    check(BROKEN)


def test_ranks_that_share_memory_are_named_as_those_that_send() -> None:
    check(SHARED)


def test_a_rank_that_is_missed_where_weights_move_is_named_too() -> None:
    check(REPLICATED)


def test_ranks_out_of_step_are_caught_before_data_moves_on_every_rank() -> None:
    check(DERAILED)


def test_the_cases_cover_every_kind_and_place() -> None:
    cases = fault_cases()
    assert len(set(cases)) == len(cases) >= 80
    for kind in ("kill", "freeze", "raise", "stall"):
        assert {(c.phase, c.direction) for c in cases if c.kind == kind} == set(PLACES)
    assert {c.kind for c in cases} >= set(DESYNCS)


def test_the_harness_finds_what_is_wrong() -> None:
    fault = Fault(kind="kill", phase="experts")
    right = Outcome(
        rank=0, error="PeerLost", message="rank 1 in experts forward", ranks=(1,), phase="experts", layer="layers.1",
        seconds=0.1, exit_code=1, exit_seconds=0.5,
    )  # fmt: skip

    def found(**wrong: object) -> list[str]:
        outcome = Outcome(**{**vars(right), **wrong})  # type: ignore[arg-type]
        return problems_of(fault, [outcome], 0.0, 2.0, 0.0)

    assert found() == []
    for wrong in (
        {"error": ""}, {"error": "RuntimeError"}, {"exit_code": None}, {"exit_code": -6}, {"exit_code": 0},
        {"seconds": 2.1}, {"exit_seconds": 19.0}, {"ranks": (2,)}, {"ranks": ()}, {"phase": "combine"},
        {"layer": "layers.0"}, {"message": "somebody"},
    ):  # fmt: skip
        assert len(found(**wrong)) == 1, wrong
    assert problems_of(fault, [right], None, 2.0, 0.0) == ["the fault never happened"]
    silent = problems_of(Fault(kind="skip_layer"), [Outcome(rank=2, exit_code=0)], 0.0, 2.0, 0.0)
    assert "raised nothing instead of DesyncError" in silent[0]
    assert FaultResult(fault=fault, outcomes=(right,), problems=()).good
