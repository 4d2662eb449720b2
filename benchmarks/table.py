"""Tables: aligned text for a terminal, Markdown for a page. And one record as a table of all its contestants."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from benchmarks.layer_case import SHAPES
from benchmarks.result import Entry, Record, middle_half

Rows = Sequence[Sequence[str]]


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
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


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
    """Megabytes, or gigabytes."""
    if count is None:
        return ""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def case_words(record: Record) -> str:
    """As in "B, bf16, 2048 tokens, 1 thread"; ranks where there are several."""
    case, names = record.case, {shape: name for name, shape in SHAPES.items()}
    words = []
    if "shape" in case:
        words.append(names.get(tuple(case["shape"]), ",".join(map(str, case["shape"]))))
    words.append(str(case["dtype"]))
    shown = [name for name in ("tokens", "threads", "ranks") if name in case and (name != "ranks" or case[name] > 1)]
    words += [f"{case[name]} {name if case[name] != 1 else name.removesuffix('s')}" for name in shown]
    return ", ".join(words)


def contestants_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Header and rows: every contestant and mode, with the reason where it did not race."""
    mallocs = [race.malloc for race in record.races]
    header = [
        "mode",
        "contestant",
        *(f"{m} malloc (middle half)" for m in mallocs),
        "speed-up",
        f"x {record.case.get('against')}",
        "x limit",
        "peak memory",
    ]
    rows: list[list[str]] = []
    first = record.races[0].entries
    for mode in dict.fromkeys(mode for race in record.races for e in race.entries for mode in e.seconds):
        for entry in first:
            each = [race.entries[first.index(entry)] for race in record.races]
            if not any(e.steps(mode) for e in each):
                continue
            ups = [r.speed_up(e, mode) for r, e in zip(record.races, each, strict=True)]
            overs = [r.over_limit(e, mode) for r, e in zip(record.races, each, strict=True)]
            rows.append(
                [
                    mode,
                    entry.name,
                    *(timed_words(e, mode) for e in each),
                    _quoted(each, ups, min) if entry.role == "ours" else "",
                    _quoted(each, _against(record, each, mode), max),
                    _quoted(each, overs, max) if entry.role in ("ours", "peer") else "",
                    size(entry.facts.get("peak")),
                ]
            )
    for entry in first:
        reasons = [race.entries[first.index(entry)].failed for race in record.races]
        if any(reasons):
            rows.append(["-", entry.name, *(f"failed: {reason}" if reason else "" for reason in reasons), *[""] * 4])
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in used], [[row[i] for i in used] for row in rows]


def memory_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Header and rows: bytes of one forward and backward beyond the parameters."""
    header = ["contestant", "resident", "tensors", "gradients among them"]
    kinds = ("resident", "tensors", "gradients")
    rows = [[name, found.get("failed") or size(found.get(kinds[0])), *(size(found.get(kind)) for kind in kinds[1:])]
            for name, found in record.memory.items()]  # fmt: skip
    return header, rows


def _against(record: Record, each: Sequence[Entry], mode: str) -> list[float | None]:
    """Times of the mode that the case names, where it names one."""
    other = record.case.get("against")
    return [r.times(e, mode, e, other) if other else None for r, e in zip(record.races, each, strict=True)]


def timed_words(entry: Entry, mode: str) -> str:
    """Median and middle half of a mode's steps; empty where it has none."""
    steps = entry.steps(mode)
    if not steps:
        return ""
    low, high = middle_half(steps)
    return f"{duration(statistics.median(steps))} ({duration(low)}..{duration(high)})"


def _quoted(each: Sequence[Entry], values: Sequence[float | None], pick: Callable[[Sequence[float]], float]) -> str:
    """The less favorable of the malloc settings, where all of them have a value."""
    known = [value for value in values if value is not None]
    if any(e.failed is not None for e in each):
        return "failed"
    return ratio(pick(known)) if len(known) == len(values) else ""
