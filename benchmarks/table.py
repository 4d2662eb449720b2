"""Tables: aligned text for a terminal, Markdown for a page. And one record as a table of all its contestants."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from benchmarks.result import ASIDE, Entry, Record, middle_half

Rows = Sequence[Sequence[str]]
UNSAID = ("bytes", "rows", ASIDE)
"""Facts that are not for the notes."""


def as_text(header: Sequence[str], rows: Rows) -> str:
    """Columns aligned, numbers to the right."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    numbers = [
        bool(rows) and all(not row[i] or row[i][0] in "0123456789-(" for row in rows) for i in range(len(header))
    ]
    lines = [
        "  ".join(
            cell.rjust(w) if number else cell.ljust(w) for cell, w, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in table
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def as_markdown(header: Sequence[str], rows: Rows) -> str:
    """A pipe table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def duration(seconds: float | None) -> str:
    """Milliseconds with three digits, microseconds below one; what failed took for ever."""
    if seconds is None:
        return ""
    if seconds == math.inf:
        return "failed"
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def ratio(value: float | None) -> str:
    """Two decimals."""
    return "" if value is None else f"{value:.2f}"


def size(count: float | None) -> str:
    """Megabytes."""
    return "" if count is None else f"{count / 1e6:.1f} MB"


def title(record: Record) -> str:
    """The case in one line."""
    words = [record.part]
    for name, value in record.case.items():
        if value in (False, None):
            continue
        if name == "shape":
            words.append(f"D,F,E,K {','.join(map(str, value))}")
        elif name in ("dtype", "preset", "workload", "family"):
            words.append(str(value))
        elif name == "in_place":
            words.append("gradients in place")
        elif isinstance(value, list):
            words.append(", ".join(map(str, value)))
        else:
            words.append(f"{value} {name.replace('_', ' ') if value != 1 else name.removesuffix('s')}")
    return "  ".join(words)


def contestants_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Header and rows: every contestant and mode, with the reason where it did not race."""
    mallocs = [race.malloc for race in record.races]
    header = ["mode", "contestant", *(f"{m} (middle half)" for m in mallocs), "speed-up", "x limit", "notes"]
    rows: list[list[str]] = []
    first = record.races[0].entries
    for mode in dict.fromkeys(mode for race in record.races for e in race.entries for mode in e.seconds):
        for entry in first:
            each = [race.entries[first.index(entry)] for race in record.races]
            if not any(e.steps(mode) for e in each):
                continue
            ups = [r.speed_up(e, mode) for r, e in zip(record.races, each, strict=True)]
            overs = [r.over_limit(e, mode) for r, e in zip(record.races, each, strict=True)]
            racing = entry.role in ("ours", "peer")
            rows.append(
                [
                    mode, entry.name, *(_timed(e, mode) for e in each), _quoted(each, ups, min) if racing else "",
                    _quoted(each, overs, max) if racing else "", _notes(entry),
                ]
            )  # fmt: skip
    for entry in first:
        if idle := entry.facts.get(ASIDE):
            rows.append(
                ["-", entry.name, *("" for _ in mallocs), "", "", f"too slow to be the limit of {', '.join(idle)}"]
            )
        for race in record.races:
            failed = race.entries[first.index(entry)].failed
            if failed is not None:
                rows.append(["-", entry.name, *("" for _ in mallocs), "", "", f"{race.malloc} malloc: {failed}"])
    return header, rows


def memory_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Header and rows: bytes of one forward and backward beyond the parameters."""
    header = ["contestant", "resident", "tensors", "of it gradients", "notes"]
    rows = [
        [name, *(size(found.get(kind)) for kind in ("resident", "tensors", "gradients")), str(found.get("failed", ""))]
        for name, found in record.memory.items()
    ]
    return header, rows


def _timed(entry: Entry, mode: str) -> str:
    steps = entry.steps(mode)
    if not steps:
        return ""
    low, high = middle_half(steps)
    return f"{duration(statistics.median(steps))} ({duration(low)}..{duration(high)})"


def _quoted(each: Sequence[Entry], values: Sequence[float | None], pick: Callable[[Sequence[float]], float]) -> str:
    """The less favourable of the malloc settings, where all of them have a value."""
    known = [value for value in values if value is not None]
    if any(e.failed is not None for e in each):
        return "failed"
    return ratio(pick(known)) if len(known) == len(values) else ""


def _notes(entry: Entry) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.facts.items() if name not in UNSAID)
