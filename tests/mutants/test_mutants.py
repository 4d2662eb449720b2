"""The mutants themselves: each changes the code and undoes it, and the ledger's cases catch them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from helpers.forks import SERVER
from mutants import MUTANTS, dispatch_bugs, mutant_named, mutants_named, mutated, score
from mutants.score import cases_for, score_mutants
from trimtab.errors import ConfigError
from trimtab.verify.cases import Case, plan_cases
from trimtab.verify.collect import Verdict


def _code() -> dict[tuple[str, str], Any]:
    """Every attribute of every trimtab module and of the classes in them, by where it is."""
    found: dict[tuple[str, str], Any] = {}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "trimtab"]:
        for name, value in vars(module).items():
            found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {(f"{module.__name__}.{name}", key): part for key, part in vars(value).items()}
    return found


def _changed(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> set[tuple[str, str]]:
    return {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)}


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_a_mutant_changes_the_code_and_undoes_itself(name: str) -> None:
    before = _code()
    with mutated(name):
        changed = _changed(before, _code())
    assert changed
    assert not {where for where, _ in changed if where.startswith("trimtab.verify")} - {
        "trimtab.verify.trimtab_impl",  # what they imported by name: code under test
        "fuzz.layer",
    }
    assert not _changed(before, _code())
    with pytest.raises(KeyError), mutated(name):
        raise KeyError(name)
    assert not _changed(before, _code())


def test_a_wrong_name_raises() -> None:
    with pytest.raises(ConfigError, match="fsdp_experts_x_ep"), mutated("no_such_bug"):
        pass
    with pytest.raises(ConfigError, match=r"no mutant 'no_such_\*'"):
        mutants_named("stale_rows", "no_such_*")


def test_mutants_are_chosen_by_name_glob_and_file() -> None:
    assert mutants_named() == MUTANTS
    assert mutants_named("dispatch_bugs") == dispatch_bugs.MUTANTS
    assert [m.name for m in mutants_named("stale_rows", "ties_*", "ties_to_higher_id")] == [
        "stale_rows", "ties_to_higher_id"
    ]  # fmt: skip


def test_names_are_unique_and_there_are_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25
    assert all(mutant.says for mutant in MUTANTS)


def test_a_mutant_is_tried_on_every_default_case_once_likely_ones_first() -> None:
    default = {case.name for case in plan_cases("default", score.RANKS)}
    for mutant in MUTANTS:
        names = [case.name for case in cases_for(mutant)]
        assert set(names) == default
        assert len(names) == len(default)
        assert names[0].split("/")[0] == mutant.look.split("/")[0]


@pytest.mark.xdist_group("ranks4")
def test_the_ledger_kills() -> None:
    """One of each way to be caught: a wrong value, bad input that goes through, a gradient, a hang, bits that a test
    sees, and work that is not shared out."""
    seen: list[score.MutantScore] = []
    names = ["weights_applied_twice", "nan_weights_pass", "ddp_experts_x_ep", "empty_rank_leaves"]
    names += ["home_gradient_last", "quota_one_slot_short"]
    scores = score_mutants(seen.append, mutants_named(*names), deadline=5.0)
    assert {process.name for process in multiprocessing.active_children()} <= {SERVER}
    assert scores == seen
    assert [s.name for s in scores if s.killed] == names
    assert scores[0].how.startswith("mismatch: rank 0: y[")
    assert scores[1].by.startswith("1r-local/nan_logits/")
    assert "bad input went through" in scores[1].how
    assert scores[2].by.startswith("2r-ep2-ddp/")
    assert " d 0." in scores[2].how
    assert (scores[4].by, scores[4].how) == (
        "dispatch.test_replicated_exchange.weights_on_rank", "test: AssertionError"
    )  # fmt: skip
    assert scores[5].by.startswith("2r-ep2-replicas/")


def test_a_survivor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan_cases("default", 1, only=["1r-local/top1/float32", "1r-local/random/float32"])
    monkeypatch.setattr(score, "cases_for", lambda mutant, seed: alone)
    (lives,) = score_mutants(chosen=mutants_named("ties_to_higher_id"))
    assert not lives.killed
    assert not lives.by
    assert mutant_named(lives.name).name == "ties_to_higher_id"


def test_a_case_that_fails_anyway_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = plan_cases("default", 1, only=["1r-local/random/float32"])
    seen: list[score.MutantScore] = []

    def run(cases: list[Case], *_: Any, mutant: str | None = None, **__: Any) -> Iterator[Verdict]:
        for case in cases:
            yield Verdict(case=case, status="mismatch", details=[f"rank 0: wrong with {mutant}"])

    monkeypatch.setattr(score, "cases_for", lambda mutant, seed: cases)
    monkeypatch.setattr(score, "run_local", run)
    (taken_back,) = score_mutants(seen.append, mutants_named("ties_to_higher_id"))
    assert [s.killed for s in seen] == [True, False]
    assert taken_back == seen[1]
    assert taken_back.how == "fails without the mutant, too: rank 0: wrong with None"


def test_a_mutant_that_a_test_does_not_see_lives_and_one_that_fails_anyway_too() -> None:
    seen = mutant_named("home_gradient_last")
    assert seen.test is not None
    blind, broken = replace(seen.test, run=os.getpid, args=()), replace(seen.test, args=("no transport",))
    (lives, fails) = (score._score(replace(seen, test=test), 0, 5.0) for test in (blind, broken))
    assert not lives.killed
    assert not lives.how
    assert not fails.killed
    assert fails.how.startswith("fails without the mutant, too: test: KeyError")


def test_a_mutant_that_no_longer_fits_has_caught_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases = plan_cases("default", 1, only=["1r-local/random/float32"])
    said = "rank 0: TypeError: _tail.<locals>.combine() got an unexpected keyword argument 'rows'"
    monkeypatch.setattr(score, "cases_for", lambda mutant, seed: cases)
    failed = Verdict(case=case, status="error", details=[said])
    monkeypatch.setattr(score, "run_local", lambda *_, **__: (verdict for verdict in [failed]))
    (found,) = score_mutants(chosen=mutants_named("ties_to_higher_id"))
    assert not found.killed
    assert found.how.startswith("does not fit the code that it changes: error: rank 0: TypeError")
