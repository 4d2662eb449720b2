"""`python -m benchmarks all`: the cases of the page, one file of results each: stopped at any time, it goes on.

Legend: shapes A, B and C are those of `benchmarks.layer_case`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.exchange import DIRECT, exchange_task
from benchmarks.layer import layer_task
from benchmarks.layer_case import SHAPES
from benchmarks.machine import revision
from benchmarks.result import Record
from benchmarks.subject import BOTH
from benchmarks.task import Task, read_record, write_record
from trimtab.errors import ConfigError


def all_tasks(*, quick: bool) -> list[Task]:
    """The most important first. quick: shape A and little else, to see that all of it runs."""
    shapes = ["A"] if quick else list(SHAPES)
    threads = (1,) if quick else (1, 2)
    several = (2,) if quick else (2, 4)
    large = (2048,) if quick else (2048, 8192)
    backends = {"bf16": ("auto", "torch"), "fp32": ("auto",)}
    alone = partial(layer_task, peers=["grouped_mm"])
    tasks = [
        alone(SHAPES[shape], tokens=tokens, dtype=dtype, threads=n, backends=backends[dtype], memory=n == 1)
        for dtype, tokens, shape, n in product(("bf16", "fp32"), (*large, 256), shapes, threads)
    ]
    for ranks, shape in product(several, shapes):
        moved = partial(exchange_task, SHAPES[shape], tokens=2048 if quick else 8192, dtype="bf16", ranks=ranks)
        tasks.append(moved(transports=["allgather", *DIRECT], peers=["all_to_all"]))
    for ranks, dtype, shape in product(several, ("bf16", "fp32"), shapes):
        spread = partial(layer_task, SHAPES[shape], tokens=2048, dtype=dtype, ranks=ranks, modes=[BOTH])
        tasks.append(spread(transports=DIRECT, peers=["all_to_all"]))
    uneven = ("balanced", "random", "zipf", "hot", "zero_expert_rank")
    tasks += [layer_task(SHAPES[shape], tokens=2048, dtype="bf16", workloads=uneven, modes=[BOTH]) for shape in shapes]
    return tasks


class Campaign:
    """The cases, each with a JSON file in `results`.

    Args:
        results: the folder. quick: a few small cases only. only: words; the cases whose file names have all of them.

    Raises:
        ConfigError: no case has such a name.
    """

    def __init__(self, results: Path, *, quick: bool, only: Sequence[str] = ()) -> None:
        self._now = revision()
        self._files = {results / f"{task.key}.json": task for task in all_tasks(quick=quick)}
        self._wanted = {f: task for f, task in self._files.items() if all(word in f.stem for word in only)}
        if not self._wanted:
            example = next(iter(self._files)).stem
            raise ConfigError(f"--only {' '.join(only)}: no case has all these words in its name, such as {example}")

    def left(self) -> dict[Path, Task]:
        """What this revision has not measured yet."""
        return {file: task for file, task in self._wanted.items() if self._stands(file) is None}

    def run(self, measure: Callable[[Task], Record]) -> Iterator[Record]:
        """Measure what is left, one by one, each written before it is given out."""
        for file, task in self.left().items():
            record = measure(task)
            write_record(record, file)
            yield record

    def measured(self) -> list[Record]:
        """What this revision has measured, in the order of the page."""
        return [record for file in self._files if (record := self._stands(file)) is not None]

    def _stands(self, file: Path) -> Record | None:
        record = read_record(file) if file.exists() else None
        return record if record is not None and record.machine["revision"] == self._now else None
