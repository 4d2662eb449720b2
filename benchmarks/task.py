"""One case to measure: who races, over what, and what they are held against; and how it becomes a record."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contestant import Contestant
from benchmarks.machine import describe
from benchmarks.race import Judge, Pace, Say, race
from benchmarks.result import ASIDE, Entry, Race, Record
from benchmarks.sources import source_digest
from benchmarks.subject import BOTH
from benchmarks.weigh import weigh


@dataclass(frozen=True, kw_only=True)
class Task:
    """One case.

    part: layer, kernels, exchange or train. case: plain values that tell it from others.
    fewest_bytes: group -> mode -> bytes, see `benchmarks.result.Race`.
    weighed: contestants whose memory is measured. make_judge: builds the judge when it is needed. prepare: what must
    be done before anyone is built.
    """

    part: str
    case: dict[str, Any]
    contestants: Sequence[Contestant]
    modes: Sequence[str]
    fewest_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    weighed: Sequence[Contestant] = ()
    make_judge: Callable[[], Judge] | None = None
    prepare: Callable[[], object] | None = None

    @property
    def key(self) -> str:
        """A file name."""
        words = [
            self.part,
            *(f"{name}-{_short(value)}" for name, value in self.case.items() if value not in (None, False)),
        ]
        return re.sub(r"[^\w.,=-]+", "_", "_".join(words))


def run_task(task: Task, mallocs: Sequence[str], pace: Pace, *, command: str, say: Say = lambda _: None) -> Record:
    """Race the task's contestants under each setting of malloc, and weigh them.

    Sources that change meanwhile leave no digest: nobody can say what was raced.
    """
    machine, began, sources = describe(), time.monotonic(), source_digest(task.part)
    if task.prepare is not None:
        task.prepare()
    judge = None if task.make_judge is None else task.make_judge()
    races, idle = list[Race](), dict[str, Entry]()
    for malloc in mallocs:
        racing = [c for c in task.contestants if c.name not in idle]
        raced = {e.name: e for e in race(racing, task.modes, malloc=malloc, pace=pace, judge=judge, say=say)}
        entries = [(raced | idle)[c.name] for c in task.contestants]
        races.append(Race(malloc=malloc, entries=entries, fewest_bytes=task.fewest_bytes))
        # A limit that was set aside in all modes sets none under the next malloc either.
        idle = {e.name: e for e in entries if e.role == "limit" and ASIDE in e.facts and not e.seconds}
    memory = weigh(task.weighed, BOTH, patience=pace.patience, say=say)
    took = round(time.monotonic() - began, 1)
    return Record(
        part=task.part,
        case=task.case,
        command=command,
        machine=machine,
        settings={
            "turns": pace.turns,
            "seconds": pace.seconds,
            "malloc": list(mallocs),
            "modes": list(task.modes),
            "took": took,
        },
        races=races,
        memory=memory,
        sources=sources if sources == source_digest(task.part) else "",
    )


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
