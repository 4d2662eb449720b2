"""Findings of all ranks put together: one verdict a case, and what it means when findings stop coming."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch._C._distributed_c10d import Store

from trimtab.verify.cases import Case
from trimtab.verify.on_rank import Finding, key_of, ready_key

Status = Literal["ok", "mismatch", "error", "hang", "lacking"]
MARKS: dict[Status, str] = {"ok": ".", "mismatch": "X", "error": "E", "hang": "H", "lacking": "-"}
"""How the table shows each."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all ranks together say of one case. `lacking`: the implementation can't be asked for it; says why."""

    case: Case
    status: Status
    errors: dict[str, float] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status in ("mismatch", "error", "hang")


class Stalled(Exception):
    """A case's findings did not come in time, or ranks died. `index`: the case; `silent`: those that died, if any did,
    else those that are waited for."""

    def __init__(self, index: int, silent: list[int], dead: bool) -> None:
        super().__init__(index)
        self.index, self.silent, self.dead = index, silent, dead


def collect(
    cases: Sequence[tuple[int, Case]],
    store: Store,
    deadline: float,
    start: float,
    died: Callable[[], list[int]],
) -> Iterator[tuple[int, Verdict]]:
    """Verdicts in order, as the findings come in.

    start: seconds that the ranks may take until they are ready. deadline: seconds that a case may take from then on.
    died: the ranks that have died. Raises Stalled where either is exceeded, or one died while some are waited for.
    """
    for place, (index, case) in enumerate(cases):
        ranks = range(case.topology.ranks)
        if place == 0:
            _wait_for(index, {rank: ready_key(rank) for rank in ranks}, store, start, died)
        _wait_for(index, {rank: key_of(index, rank) for rank in ranks}, store, deadline, died)
        findings = [Finding.from_json(store.get(key_of(index, rank)).decode()) for rank in ranks]
        yield index, judge_case(case, findings)


def _wait_for(
    index: int, keys: dict[int, str], store: Store, deadline: float, died: Callable[[], list[int]]
) -> None:  # fmt: skip
    end = time.monotonic() + deadline
    dead: list[int] = []
    while missing := sorted(rank for rank, key in keys.items() if not store.check([key])):
        if dead or time.monotonic() > end:
            raise Stalled(index, dead or missing, bool(dead))
        dead = died()  # looked at before the keys are read once more: a rank may have died behind its answer
        if not dead:
            time.sleep(0.002)


def judge_case(case: Case, findings: Sequence[Finding]) -> Verdict:
    """One verdict: a fault outweighs a mismatch."""
    faults = [f"rank {f.rank}: {f.fault}" for f in findings if f.fault is not None]
    mismatches = [str(mismatch) for f in findings for mismatch in f.mismatches]
    errors: dict[str, float] = {}
    for finding in findings:
        for column, error in finding.errors.items():
            errors[column] = max(errors.get(column, 0.0), error)
    status: Status = "error" if faults else "mismatch" if mismatches else "ok"
    seconds = max(f.seconds for f in findings)
    return Verdict(case=case, status=status, errors=errors, details=faults + mismatches, seconds=seconds)


def stalled_verdict(case: Case, stalled: Stalled, deadline: float, said: str) -> Verdict:
    """What is said of a case whose findings did not come. `said`: the last words of the silent ranks."""
    who = f"rank(s) {', '.join(map(str, stalled.silent))}"
    what = f"{who} died" if stalled.dead else f"{who}: no answer within {deadline:g} s"
    details = [f"{what}: {said}" if said else what]
    return Verdict(case=case, status="error" if stalled.dead else "hang", details=details, seconds=deadline)
