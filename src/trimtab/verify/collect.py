"""Results of all ranks put together: one verdict a case, and what it means when results stop coming."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.distributed import Store

from trimtab.verify.cases import Case
from trimtab.verify.on_rank import READY, RankResult, key_of

Status = Literal["ok", "mismatch", "refused", "error", "hang", "lacking"]
START = 60.0
"""Seconds that ranks may take to start."""
GRACE = 5.0
"""Seconds that the other ranks of a case have once one has found a fault."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of all ranks together on one case. `lacking`: the implementation can't be asked for it; says why.
    `refused`: on every rank its own code raised, by a statement that says so.
    replicas: experts that were sent to other ranks, in all.

    stalled: results did not come in time, or ranks died; these ranks answer nothing more.
    """

    case: Case
    status: Status
    errors: dict[str, float] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    seconds: float = 0.0
    replicas: int = 0
    stalled: bool = False

    @property
    def failed(self) -> bool:
        return self.status in ("mismatch", "refused", "error", "hang")


def collect(
    cases: Sequence[tuple[int, Case]], store: Store, deadline: float, start: float = START,
    died: Callable[[], list[int]] = list, said: Callable[[list[int]], str] = lambda silent: "",
) -> Iterator[Verdict]:  # fmt: skip
    """Verdicts in order, as the results come in; one that is `stalled` is the last.

    start: seconds that the ranks may take until they are ready. deadline: seconds that a case may take from then on,
    and `GRACE` at most once a rank has found a fault: the others may wait for it in vain.
    died: the ranks that have died. said: the last words of ranks that are silent.
    """
    for index, case in [(READY, case) for _, case in cases[:1]] + list(cases):
        seconds = start if index == READY else deadline
        results, dead = _wait_for(index, case.topology.ranks, store, seconds, died)
        silent = dead or sorted(set(range(case.topology.ranks)) - {result.rank for result in results})
        if silent:
            yield _stalled(case, results, silent, bool(dead), seconds, said(silent))
            return
        if index != READY:
            yield judge_case(case, results)


def _wait_for(
    index: int, ranks: int, store: Store, seconds: float, died: Callable[[], list[int]]
) -> tuple[list[RankResult], list[int]]:
    """The results that came, and the ranks that had died if not all did."""
    end = time.monotonic() + seconds
    dead: list[int] = []
    found: dict[int, RankResult] = {}
    hurried = False
    while True:
        for rank in set(range(ranks)) - found.keys():
            if store.check([key_of(index, rank)]):
                found[rank] = RankResult.get(store, index, rank)
        results = [found[rank] for rank in sorted(found)]
        if len(results) == ranks:
            return results, []
        if not hurried and _faults(results):
            end, hurried = min(end, time.monotonic() + GRACE), True
        if dead or time.monotonic() > end:
            return results, dead
        dead = died()  # looked at before the store is read once more: a rank may have died behind its answer
        if not dead:
            time.sleep(0.002)


def _faults(results: Sequence[RankResult]) -> list[str]:
    """The soonest first: others often follow from it."""
    return [f"rank {f.rank}: {f.fault}" for f in sorted(results, key=lambda f: f.seconds) if f.fault is not None]


def judge_case(case: Case, results: Sequence[RankResult]) -> Verdict:
    """One verdict: a fault outweighs a mismatch."""
    faults, mismatches = _faults(results), [said for f in results for said in f.mismatches]
    replicas = sum(f.replicas for f in results)
    if not faults and not replicas and any(f.hot for f in results):
        mismatches.append("no expert was copied, and a rank has more slots than the mean")
    columns = dict.fromkeys(column for f in results for column in f.errors)
    errors = {column: max(f.errors.get(column, 0.0) for f in results) for column in columns}
    status: Status = "error" if faults else "mismatch" if mismatches else "ok"
    if faults and all(f.refused for f in results):
        status = "refused"
    seconds = max(f.seconds for f in results)
    details = faults + mismatches
    return Verdict(case=case, status=status, errors=errors, details=details, seconds=seconds, replicas=replicas)


def _stalled(
    case: Case, results: Sequence[RankResult], silent: list[int], dead: bool, waited: float, said: str
) -> Verdict:
    faults = _faults(results)
    who = f"rank(s) {', '.join(map(str, silent))}"
    how = f"{who} died" if dead else f"{who}: no answer within {f'{GRACE:g} s of that' if faults else f'{waited:g} s'}"
    details = [*faults, f"{how}: {said}" if said else how]
    status: Status = "error" if faults or dead else "hang"
    return Verdict(case=case, status=status, details=details, seconds=waited, stalled=True)
