"""One case to measure: who races, over what, and what they are held against; how it becomes a record, and a file."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contestant import Contestant
from benchmarks.machine import describe, others_seconds
from benchmarks.race import Judge, Pace, Say, race, weigh
from benchmarks.result import Race, Record
from benchmarks.subject import BOTH
from trimtab.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Task:
    """One case.

    part: layer, exchange, step or overhead. case: plain values that tell it from others.
    fewest_bytes: group -> mode -> bytes, see `benchmarks.result.Race`.
    weighed: contestants whose memory is measured. make_judge: builds the judge when it is needed.
    """

    part: str
    case: dict[str, Any]
    contestants: Sequence[Contestant]
    modes: Sequence[str]
    fewest_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    weighed: Sequence[Contestant] = ()
    make_judge: Callable[[], Judge] | None = None

    @property
    def key(self) -> str:
        """A file name."""
        words = [self.part]
        for name, value in self.case.items():
            words.append(f"{name}-{','.join(map(str, value)) if isinstance(value, list) else value}")
        return re.sub(r"[^\w.,=-]+", "_", "_".join(words))


def run_task(task: Task, mallocs: Sequence[str], pace: Pace, *, command: str, say: Say = lambda _: None) -> Record:
    """Race the task's contestants under each setting of malloc, and weigh them."""
    machine, began, others = describe(), time.monotonic(), others_seconds()
    judge = None if task.make_judge is None else task.make_judge()
    races = []
    for malloc in mallocs:
        entries = race(task.contestants, task.modes, malloc=malloc, pace=pace, judge=judge, say=say)
        races.append(Race(malloc=malloc, entries=entries, fewest_bytes=task.fewest_bytes))
    memory = weigh(task.weighed, BOTH, patience=pace.patience, say=say)
    settings = {"turns": pace.turns, "seconds": pace.seconds, "modes": list(task.modes)}
    if others is not None and (after := others_seconds()) is not None:
        settings["others"] = (after - others) / (time.monotonic() - began) / (os.cpu_count() or 1)
    return Record(
        part=task.part,
        case=task.case,
        command=command,
        machine=machine,
        settings=settings | {"took": round(time.monotonic() - began, 1)},
        races=races,
        memory=memory,
    )


def write_record(record: Record, path: Path) -> None:
    """As JSON; its folder is made. Raises InputError where it cannot be written."""
    write(path, json.dumps(record.as_json()))


def read_record(path: Path) -> Record:
    """Raises InputError, naming the file, for what is something else."""
    try:
        return Record.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a file that these benchmarks wrote ({error})") from error


def write(path: Path, text: str) -> None:
    """Raises InputError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
