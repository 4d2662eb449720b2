"""Findings of all ranks put together: one verdict a case, and what it means when findings stop coming."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.distributed import Store

from trimtab.verify.cases import Case
from trimtab.verify.on_rank import Finding, key_of, ready_key

Status = Literal["ok", "mismatch", "error", "hang", "lacking"]
MARKS: dict[Status, str] = {"ok": ".", "mismatch": "X", "error": "E", "hang": "H", "lacking": "-"}
"""How the table shows each."""
GRACE = 5.0
"""Seconds that the other ranks of a case have once one has found a fault."""


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
    else those that are waited for; `findings`: of the others, as far as they are there."""

    def __init__(self, index: int, silent: list[int], dead: bool, findings: Sequence[Finding]) -> None:
        super().__init__(index)
        self.index, self.silent, self.dead, self.findings = index, silent, dead, findings


def collect(
    cases: Sequence[tuple[int, Case]],
    store: Store,
    deadline: float,
    start: float,
    died: Callable[[], list[int]],
) -> Iterator[tuple[int, Verdict]]:
    """Verdicts in order, as the findings come in.

    start: seconds that the ranks may take until they are ready. deadline: seconds that a case may take from then on,
    and `GRACE` at most once a rank has found a fault: the others may wait for it in vain.
    died: the ranks that have died. Raises Stalled where either is exceeded, or one died while some are waited for.
    """
    for place, (index, case) in enumerate(cases):
        ranks = range(case.topology.ranks)
        if place == 0:
            _wait_for(index, {rank: ready_key(rank) for rank in ranks}, store, start, died)
        findings = _wait_for(index, {rank: key_of(index, rank) for rank in ranks}, store, deadline, died)
        yield index, judge_case(case, findings)


def _wait_for(
    index: int, keys: dict[int, str], store: Store, deadline: float, died: Callable[[], list[int]]
) -> list[Finding]:
    end = time.monotonic() + deadline
    dead: list[int] = []
    found: dict[int, Finding] = {}
    hurried = False
    while True:
        for rank in keys.keys() - found.keys():
            if store.check([keys[rank]]):
                found[rank] = Finding.get(store, keys[rank])
        findings = [found[rank] for rank in keys if rank in found]
        if len(findings) == len(keys):
            return findings
        if not hurried and _faults(findings):
            end, hurried = min(end, time.monotonic() + GRACE), True
        if dead or time.monotonic() > end:
            missing = [rank for rank in keys if rank not in found]
            raise Stalled(index, dead or missing, bool(dead), findings)
        dead = died()  # looked at before the keys are read once more: a rank may have died behind its answer
        if not dead:
            time.sleep(0.002)


def _faults(findings: Sequence[Finding]) -> list[str]:
    """The soonest first: others often follow from it."""
    return [f"rank {f.rank}: {f.fault}" for f in sorted(findings, key=lambda f: f.seconds) if f.fault is not None]


def judge_case(case: Case, findings: Sequence[Finding]) -> Verdict:
    """One verdict: a fault outweighs a mismatch."""
    faults, mismatches = _faults(findings), [said for f in findings for said in f.mismatches]
    columns = dict.fromkeys(column for f in findings for column in f.errors)
    errors = {column: max(f.errors.get(column, 0.0) for f in findings) for column in columns}
    status: Status = "error" if faults else "mismatch" if mismatches else "ok"
    seconds = max(f.seconds for f in findings)
    return Verdict(case=case, status=status, errors=errors, details=faults + mismatches, seconds=seconds)


def stalled_verdict(case: Case, stalled: Stalled, deadline: float, said: str) -> Verdict:
    """What is said of a case whose findings did not come. `said`: the last words of the silent ranks."""
    faults = _faults(stalled.findings)
    who = f"rank(s) {', '.join(map(str, stalled.silent))}"
    waited = f"{GRACE:g} s of that" if faults else f"{deadline:g} s"
    what = f"{who} died" if stalled.dead else f"{who}: no answer within {waited}"
    details = [*faults, f"{what}: {said}" if said else what]
    return Verdict(case=case, status="error" if faults or stalled.dead else "hang", details=details, seconds=deadline)
