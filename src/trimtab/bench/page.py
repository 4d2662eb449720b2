"""docs/benchmarks.md: every number that was measured, its bar, the machine and the command."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.bench.bars import case_words, judge_bars, memory_ratios
from trimtab.bench.finding import Finding, findings
from trimtab.bench.machine import words
from trimtab.bench.result import Record
from trimtab.bench.table import as_markdown, duration, ratio, size

METHOD = """\
Every contestant lives in processes of its own, one per rank, and they take turns: A B C, C B A, and so on. Before the
first turn its output and all its gradients are compared with plain formulas; wrong numbers do not race. Each case is
raced with malloc as it comes (*default*) and with one that keeps what it is given (*tuned*: `MALLOC_MMAP_THRESHOLD_`,
`MALLOC_TRIM_THRESHOLD_`), in fresh processes; the smaller speed-up and the larger multiple of the limit are quoted.
Times are medians over the steps of all turns, of the slowest rank. *forward* runs without a graph.

*speed-up* is the fastest peer's time over trimtab's. *x limit* is trimtab's time over the limit of the same race, which
is the longer of dense GEMMs of the same FLOPs (all rows at once, into memory that is there; of bf16 and float32 the
faster) and the fewest bytes (weights, tokens and gradients, once each way) over the measured speed of a copy. With
ranks the raw exchange of the same rows is added to the GEMMs. The shapes D, F, E, K: A is 512, 256, 64, 8; B is 1024,
512, 32, 4; C is 1024, 2816, 8, 2. Tokens are per rank."""

SECTIONS = {
    "layer": "One experts layer",
    "kernels": "Kernels",
    "exchange": "Dispatch and combine",
    "train": "Training steps",
}


def page(records: Sequence[Record], *, chart: str | None = None) -> str:
    """Markdown. chart: the address of a picture, if there is one."""
    parts = ["# Benchmarks", METHOD, _machines(records)]
    if chart is not None:
        parts.append(f"![time over the limit]({chart})")
    parts += ["## What was asked for", _bars(records)]
    for part, heading in SECTIONS.items():
        chosen = [record for record in records if record.part == part]
        if chosen:
            parts += [f"## {heading}", _section(chosen)]
    if any(record.memory for record in records):
        parts += ["## Memory of forward+backward", _memory(records)]
    if absent := _absent(records):
        parts += ["## Not raced", absent]
    parts += ["## Commands", _commands(records)]
    return "\n\n".join(parts) + "\n"


def _machines(records: Sequence[Record]) -> str:
    machines = dict.fromkeys(words(record.machine) for record in records)
    lines = [f"Machine: {machine}." for machine in machines]
    loaded = [r for r in records if r.machine["load_average"][0] > r.machine["cores"] + 0.5]
    if loaded:
        lines.append(f"**{len(loaded)} of {len(records)} cases began while others were using the cores.**")
    return "\n\n".join(lines)


def _bars(records: Sequence[Record]) -> str:
    rows = [
        [
            bar.where, bar.asked, "not measured" if bar.found is None else ratio(bar.found), str(bar.cases), bar.at,
            "" if bar.found is None else "yes" if bar.met else "**no**",
        ]
        for bar in judge_bars(records)
    ]  # fmt: skip
    return as_markdown(["where", "asked", "found (worst)", "cases", "worst case", "met"], rows)


def _section(records: Sequence[Record]) -> str:
    found = findings(records)
    mallocs = list(dict.fromkeys(race.malloc for record in records for race in record.races))
    limited, peered = any(f.limits for f in found), any(f.peer for f in found)
    header = ["case", "pass", "trimtab", *mallocs]
    if peered:
        header += ["fastest peer", *mallocs, *(f"speed-up {m}" for m in mallocs), "**quoted**"]
    if limited:
        header += ["limit", *(f"x limit {m}" for m in mallocs), "**quoted**"]
    return as_markdown(header, [_row(f, mallocs, limited, peered) for f in found])


def _row(f: Finding, mallocs: Sequence[str], limited: bool, peered: bool) -> list[str]:
    group = "" if f.group in ("", "balanced") else f", {f.group}"
    row = [f"{case_words(f.record)}{group}", f.mode, f.name.removeprefix("trimtab ")]
    row += [duration(f.own.get(m)) for m in mallocs]
    if peered:
        row += [f.peer_name, *(duration(f.peer.get(m)) for m in mallocs)]
        row += [*(ratio(f.speed_ups.get(m)) for m in mallocs), _bold(f.speed_up)]
    if limited:
        limit = next(iter(f.limits.values()), None)
        row += ["" if limit is None else f"{duration(limit.seconds)}, {limit.what}"]
        row += [*(ratio(f.over_limits.get(m)) for m in mallocs), _bold(f.over_limit)]
    return row


def _bold(value: float | None) -> str:
    return "" if value is None else f"**{ratio(value)}**"


def _memory(records: Sequence[Record]) -> str:
    kinds = ("resident", "tensors")
    rows = []
    for record in records:
        for name, found in record.memory.items():
            row = [case_words(record), name, *(size(found.get(kind)) for kind in (*kinds, "gradients"))]
            for gradients in (True, False):
                over = memory_ratios(record, name, gradients=gradients)
                row += [ratio(over.get(kind)) for kind in kinds]
            rows.append(row)
    intro = (
        "Peak bytes beyond parameters and inputs. *resident*: growth of the process's memory, with what kernels and "
        "libraries keep; *tensors*: what PyTorch's storages add up to, without the pages that compiled kernels own. "
        "Gradients of parameters and inputs are among them; the last two columns leave them out."
    )
    header = ["case", "who", *kinds, "gradients", *(f"{kind} over grouped_mm" for kind in kinds)]
    header += [f"{kind} without gradients" for kind in kinds]
    return f"{intro}\n\n{as_markdown(header, rows)}"


def _absent(records: Sequence[Record]) -> str:
    seen: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for race in record.races:
            for entry in race.entries:
                if entry.failed is not None:
                    seen.setdefault((entry.name, entry.failed), []).append(case_words(record))
    rows = [[name, reason, f"{len(set(cases))}: {cases[0]}"] for (name, reason), cases in seen.items()]
    return as_markdown(["who", "why", "cases, the first"], rows) if rows else ""


def _commands(records: Sequence[Record]) -> str:
    commands = dict.fromkeys(record.command for record in records)
    return "```sh\n" + "\n".join(commands) + "\n```"
