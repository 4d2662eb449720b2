"""How many known bugs the ledger catches: each mutant is judged as trimtab is, until a case fails."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from helpers.ranks import run_ranks
from mutants import MUTANTS, Mutant, mutated
from mutants.patching import RanksTest
from trimtab.verify.cases import Case, plan_cases
from trimtab.verify.collect import Verdict
from trimtab.verify.run import run_local

RANKS = 8
DEADLINE = 8.0
"""Seconds a case may take before it counts as a hang."""
SLACK = 5.0
"""How much longer it may take where no hang is expected: a slow machine must not pass for a caught bug."""

BROKEN = re.compile(r"(TypeError|AttributeError|NameError|UnboundLocalError): |<locals>")
"""What a mutant raises whose own function no longer fits: no bug of the field says this, and nothing was caught."""


@dataclass(frozen=True, kw_only=True)
class MutantScore:
    """What became of one mutant. by: the case or test that failed; how: "mismatch", "error", "hang" or "test", and what
    it said first. Where it survived every case `by` is empty; where the case fails without the mutant, too, it was not
    caught by it, and `how` says so."""

    name: str
    killed: bool
    by: str = ""
    how: str = ""
    seconds: float = 0.0


def cases_for(mutant: Mutant, seed: int = 0) -> list[Case]:
    """All cases of the default level: those where the mutant should show, then those of the quick level, then the
    rest."""
    every = {case.name: case for case in plan_cases("default", RANKS, seed=seed)}
    quick = [case.name for case in plan_cases("quick", RANKS, seed=seed)]
    likely = [name for name in every if fnmatchcase(name, mutant.look)]
    return [every[name] for name in dict.fromkeys((*likely, *quick, *every))]


def score_mutants(
    report: Callable[[MutantScore], None] | None = None,
    chosen: Sequence[Mutant] = MUTANTS,
    seed: int = 0,
    deadline: float = DEADLINE,
    most: int | None = None,
) -> list[MutantScore]:
    """Run the cases of the default level on each mutant, until one fails.

    The cases that failed are run once more on trimtab as it is: one that fails there as well has caught nothing.

    Args:
        report: called with each score as it is known, and again with one that this took back.
        chosen: the mutants.
        seed: of the cases.
        deadline: seconds for one case of a mutant that hangs; others have `SLACK` times as long.
        most: cases that a mutant may survive, the likely ones first, before it counts as alive; all if None.
    """
    scores = []
    for mutant in chosen:
        score = _score(mutant, seed, deadline, most)
        scores.append(score)
        if report is not None:
            report(score)
    broken = {verdict.case.name: verdict for verdict in _controls(scores, seed, SLACK * deadline) if verdict.failed}
    for i, score in enumerate(scores):
        if score.killed and score.by in broken:
            how = f"fails without the mutant, too: {_first_words(broken[score.by].details)}"
            scores[i] = replace(score, killed=False, how=how)
            if report is not None:
                report(scores[i])
    return scores


def _controls(scores: Sequence[MutantScore], seed: int, deadline: float) -> Iterator[Verdict]:
    """The cases that mutants died of, without a mutant."""
    by = {score.by for score in scores if score.killed}
    cases = [case for case in plan_cases("default", RANKS, seed=seed) if case.name in by]
    yield from run_local(sorted(cases, key=lambda case: case.topology.ranks), "trimtab", deadline=deadline)


def _score(mutant: Mutant, seed: int, deadline: float, most: int | None = None) -> MutantScore:
    start = time.perf_counter()
    if mutant.test is not None:
        found, control = (_what_fails(mutant.test, bug) for bug in (mutant.name, None))
        how, seconds = f"fails without the mutant, too: {control}" if control else found, time.perf_counter() - start
        killed = bool(found) and not control and BROKEN.search(found) is None
        return MutantScore(name=mutant.name, killed=killed, by=mutant.test.name, how=how, seconds=seconds)
    deadline = deadline if mutant.hangs else SLACK * deadline
    cases, bug = cases_for(mutant, seed)[:most], partial(mutated, mutant.name)
    verdicts = run_local(cases, "trimtab", deadline=deadline, around=bug)
    with contextlib.closing(verdicts):  # type: ignore[type-var]
        failed = next((verdict for verdict in verdicts if verdict.failed), None)
    seconds = time.perf_counter() - start
    if failed is None:
        return MutantScore(name=mutant.name, killed=False, seconds=seconds)
    how = f"{failed.status}: {_first_words(failed.details)}"
    fits = BROKEN.search(how) is None
    how = how if fits else f"does not fit the code that it changes: {how}"
    return MutantScore(name=mutant.name, killed=fits, by=failed.case.name, how=how, seconds=seconds)


def _what_fails(test: RanksTest, bug: str | None) -> str:
    """What a test says with a bug in each rank, or without one; "" where it passes."""
    try:
        run_ranks(_with_bug, test.ranks, bug, test)
    except AssertionError as error:
        return f"test: {str(error).strip().splitlines()[-1]}"
    return ""


def _with_bug(bug: str | None, test: RanksTest) -> None:
    with contextlib.nullcontext() if bug is None else mutated(bug):
        test.run(*test.args)


def _first_words(details: Sequence[str]) -> str:
    """The first detail as one line: of a traceback, who raised and what."""
    lines = details[0].strip().splitlines()
    return lines[0] if "Traceback" not in lines[0] else f"{lines[0].split(': ')[0]}: {lines[-1]}"
