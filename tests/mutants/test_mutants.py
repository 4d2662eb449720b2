"""The mutants themselves: each changes the code and undoes it, and the ledger's cases catch them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest

from helpers.forks import SERVER
from mutants import MUTANTS, dispatch_bugs, mutant_named, mutants_named, mutated, score
from mutants.patching import Edit, defined, function_at
from mutants.score import cases_for, score_mutants
from trimtab.errors import ConfigError
from trimtab.verify.cases import Case, plan_cases
from trimtab.verify.collect import Status, Verdict


def _code() -> dict[tuple[str, str], Any]:
    """The code of every function of every trimtab module and of the classes in them, by where it is."""
    found: dict[tuple[str, str], Any] = {}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "trimtab"]:
        own = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
        for value in (part for v in own for part in (v, *(vars(v).values() if isinstance(v, type) else ()))):
            function = defined(value)
            if isinstance(function, FunctionType):
                found[module.__name__, function.__qualname__] = function.__code__
    return found


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_a_mutant_changes_the_code_and_undoes_itself(name: str) -> None:
    places = {edit.where: function_at(edit.where) for edit in mutant_named(name).edits}
    before = _code()
    with mutated(name):
        changed = {key for key, code in _code().items() if before[key] is not code}
    assert changed == {(f.__module__, f.__qualname__) for f in places.values()}
    assert _code() == before
    with pytest.raises(KeyError), mutated(name):
        raise KeyError(name)
    assert _code() == before


def test_a_mutant_whose_text_is_gone_does_not_fit() -> None:
    gone = replace(mutant_named("stale_rows"), edits=(Edit("moe:MoE._take", "no such text", ""),))
    with pytest.raises(NameError, match=r"stands 0 times in trimtab\.moe:MoE\._take"), gone.applied():
        pass


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


MISFIT = "rank 0: TypeError: forward() got an unexpected keyword argument 'rows'"
UNBOUND = "rank 1: UnboundLocalError: cannot access local variable 'rows' where it is not associated with a value"


@pytest.mark.parametrize(
    ("status", "said", "anyway", "how"),
    [
        ("ok", "", False, ""), ("mismatch", "rank 0: y[3]", True, "fails without the mutant, too: rank 0: y[3]"),
        *(("error", e, False, f"does not fit the code that it changes: error: {e}") for e in (MISFIT, UNBOUND)),
    ],
    ids=["survives", "fails anyway", "does not fit", "nor does this one"],
)  # fmt: skip
def test_what_kills_nothing(status: Status, said: str, anyway: bool, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only = plan_cases("default", 1, only=["1r-local/random/float32"])
    seen: list[score.MutantScore] = []

    def run(cases: list[Case], *_: Any, around: Any = None, **__: Any) -> Iterator[Verdict]:
        yield from (Verdict(case=case, status=status if around or anyway else "ok", details=[said]) for case in cases)

    monkeypatch.setattr(score, "cases_for", lambda mutant, seed: only)
    monkeypatch.setattr(score, "run_local", run)
    (found,) = score_mutants(seen.append, mutants_named("ties_to_higher_id"))
    assert [s.killed for s in seen] == ([True, False] if anyway else [False])
    assert (found, found.how) == (seen[-1], how)


def test_a_mutant_that_a_test_does_not_see_lives_and_one_that_fails_anyway_too() -> None:
    seen = mutant_named("home_gradient_last")
    assert seen.test is not None
    blind, broken = replace(seen.test, run=os.getpid, args=()), replace(seen.test, ranks=1, args=("no transport",))
    (lives, fails) = (score._score(replace(seen, test=test), 0, 5.0) for test in (blind, broken))
    assert not lives.killed
    assert not lives.how
    assert not fails.killed
    assert fails.how.startswith("fails without the mutant, too: test: KeyError")
