"""Everything that the page shows, one file of results a case: stopped at any time, it goes on with what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trimtab.bench.chart import draw
from trimtab.bench.choose import kernel_sets
from trimtab.bench.grid import all_tasks
from trimtab.bench.page import page
from trimtab.bench.result import Record
from trimtab.bench.store import read_records, write_records
from trimtab.bench.task import Task
from trimtab.errors import InputError


class Campaign:
    """The cases of `trimtab bench all`.

    Args:
        results: the folder with a JSON file per case that was measured.
        quick: a few small cases only.
        only: words; the cases whose file names have all of them.
    """

    def __init__(self, results: Path, *, quick: bool, only: Sequence[str] = ()) -> None:
        tasks = all_tasks(results / "presets", kernel_sets(), quick=quick)
        self._files = {results / f"{task.key}.json": task for task in tasks}
        self._only = only

    def left(self) -> dict[Path, Task]:
        """What has no results yet."""
        return {
            file: task
            for file, task in self._files.items()
            if not file.exists() and all(word in file.stem for word in self._only)
        }

    def measured(self) -> list[Path]:
        """The files that are there, in the order of the page."""
        return [file for file in self._files if file.exists()]

    def run(self, measure: Callable[[Task], Record]) -> Iterator[Record]:
        """Measure what is left, one by one, each written before it is given out."""
        for file, task in self.left().items():
            record = measure(task)
            write_records([record], file)
            yield record


def write_page(files: Sequence[Path], out: Path, chart: Path | None = None) -> None:
    """Write the page of these results to `out`, with a picture drawn to `chart`.

    Raises InputError where a file cannot be read or written, BackendError for a chart without matplotlib.
    """
    records = read_records(files)
    address = None
    if chart is not None:
        draw(records, chart)
        address = chart.name if chart.parent.resolve() == out.parent.resolve() else str(chart)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(records, chart=address), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
