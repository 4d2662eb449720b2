"""Everything that the page shows, one file of results a case: stopped at any time, it goes on with what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.chart import can_draw, draw
from benchmarks.choose import kernel_sets
from benchmarks.grid import all_tasks
from benchmarks.page import GPU_PAGE, page
from benchmarks.result import Record
from benchmarks.sources import source_digest
from benchmarks.store import read_records, write, write_records
from benchmarks.task import Task
from trimtab.errors import ConfigError, InputError


class Campaign:
    """The cases of `trimtab bench all`, the most important first.

    Args:
        results: the folder with a JSON file per case that was measured.
        quick: a few small cases only.
        only: words; the cases whose file names have all of them.

    Raises:
        ConfigError: no case has such a name.
    """

    def __init__(self, results: Path, *, quick: bool, only: Sequence[str] = ()) -> None:
        tasks = all_tasks(results / "presets", kernel_sets(), quick=quick)
        self._files = {results / f"{task.key}.json": task for task in tasks}
        self._wanted = {f: task for f, task in self._files.items() if all(word in f.stem for word in only)}
        if not self._wanted:
            example = next(iter(self._files)).stem
            raise ConfigError(f"--only {' '.join(only)}: no case has all these words in its name, such as {example}")

    def left(self) -> dict[Path, Task]:
        """What has no results of these sources yet, or results in which nobody of ours was timed."""
        now = {part: source_digest(part) for part in {task.part for task in self._wanted.values()}}
        return {file: task for file, task in self._wanted.items() if not _stands(file, now[task.part])}

    def measured(self) -> list[Path]:
        """The files that are there, in the order of the page."""
        return [file for file in self._files if file.exists()]

    def run(self, measure: Callable[[Task], Record]) -> Iterator[Record]:
        """Measure what is left, one by one, each written before it is given out."""
        for file, task in self.left().items():
            record = measure(task)
            write_records([record], file)
            yield record


def _stands(file: Path, sources: str) -> bool:
    return file.exists() and all(r.sources == sources and not r.in_vain for r in read_records([file]))


def write_page(files: Sequence[Path], out: Path, chart: Path | None = None) -> bool:
    """Write the page of these results to `out`, and draw `chart`; returns whether there was anything to draw.

    What was measured with other sources than these is neither drawn nor judged, and stands under a heading of its own.
    Raises InputError where there are no results or a file cannot be read or written, BackendError for a chart without
    matplotlib.
    """
    records = read_records(files)
    if not records:
        raise InputError(f"{out}: not written, there are no results to show")
    now = {part: source_digest(part) for part in {record.part for record in records}}
    current = [record for record in records if record.sources == now[record.part]]
    earlier = [record for record in records if record.sources != now[record.part]]
    address = None
    drawable = can_draw(current)
    if chart is not None and drawable:
        draw(current, chart)
        address = chart.name if chart.parent.resolve() == out.parent.resolve() else str(chart)
    gpu = GPU_PAGE if (out.parent / GPU_PAGE).exists() else None
    write(out, page(current, earlier=earlier, chart=address, gpu=gpu))
    return drawable
