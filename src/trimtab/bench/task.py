"""One case to measure: who races, over what, and what they are held against; and how it becomes a record."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.bench.contestant import Contestant
from trimtab.bench.machine import describe
from trimtab.bench.race import Judge, Pace, Say, race, weigh
from trimtab.bench.result import Race, Record
from trimtab.bench.subject import BOTH


@dataclass(frozen=True, kw_only=True)
class Task:
    """One case.

    part: layer, kernels, exchange or train. case: plain values that tell it from others.
    fewest_bytes: group -> mode -> bytes, see `trimtab.bench.result.Race`.
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
    """Race the task's contestants under each setting of malloc, and weigh them."""
    machine = describe()
    if task.prepare is not None:
        task.prepare()
    judge = None if task.make_judge is None else task.make_judge()
    races = []
    for malloc in mallocs:
        entries = race(task.contestants, task.modes, malloc=malloc, pace=pace, judge=judge, say=say)
        races.append(Race(malloc=malloc, entries=entries, fewest_bytes=task.fewest_bytes))
    return Record(
        part=task.part,
        case=task.case,
        command=command,
        machine=machine,
        settings={"turns": pace.turns, "seconds": pace.seconds, "malloc": list(mallocs)},
        races=races,
        memory=weigh(task.weighed, BOTH, patience=pace.patience, say=say),
    )


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
