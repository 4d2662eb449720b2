"""Pages: every number that was measured, the machine and the command."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from benchmarks.machine import describe, machine_words
from benchmarks.result import Entry, Race, Record, largest, smallest
from benchmarks.table import as_markdown, case_words, contestants_table, duration, memory_table, ratio

METHOD = """\
Every contestant lives in processes of its own, one per rank, on the same cores, and they take turns: A B C, C B A, and
so on. Before the first turn the output and all gradients of a layer, and what an exchange brings home both ways, are
compared with plain formulas, and loss and gradients of a training step with those of stock transformers; wrong numbers
do not race. Each case is raced with malloc as it comes (*default*) and with one that keeps what it is given (*tuned*:
`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`), in fresh processes; the smaller speed-up and the larger multiple of
the limit are quoted. Times are medians over the steps of all turns, of the slowest rank. Ratios are medians over the
turns of what the ratio was within a turn: other users of the processor make it now faster, now slower by half.
*forward* of a layer runs without a graph."""

LIMIT = """\
*speed-up* is the fastest peer's time over trimtab's. *x limit* is trimtab's time over the limit of the same race, which
is the longer of dense GEMMs of the same FLOPs (all rows at once, into memory that is there; of bf16 and float32 the
faster) and the fewest bytes (weights, tokens and gradients, once each way) over the measured speed of a replica. With
ranks the raw exchange of the same rows is added to the GEMMs. The shapes D, F, E, K: A is 512, 256, 64, 8; B is 1024,
512, 32, 4; C is 1024, 2816, 8, 2. Tokens are per rank. *trimtab auto* is what users get, *torch* stock PyTorch alone.
transformers' combine weighs and sums the slots of a token; trimtab's experts do both, so its exchange has neither to
do."""

MEMORY = """\
Peak bytes beyond parameters and inputs. *resident*: growth of the process's memory, with what kernels and libraries
keep; *tensors*: what PyTorch's storages add up to. Gradients of parameters and inputs, the same bytes for everyone, are
among them."""

PEAK = """\
*peak memory* is the most that a contestant's process held in all turns, parameters, gradients and optimizer state
included."""

ON = "## On "
"""How the heading of a processor's section begins."""
CALM = 0.05
"""The share of the cores' time that others may have in a race."""

Table = Callable[[Record], tuple[list[str], list[list[str]]]]

SECTIONS = {"layer": "One experts layer", "exchange": "Dispatch and combine"}

TITLES = {
    "layer": "One experts layer",
    "exchange": "Dispatch and combine",
    "step": "A whole training step",
    "overhead": "Host overhead",
    "quantized": "Experts of codes",
    "adapters": "Adapters on frozen experts",
    "frozen": "Experts that nobody trains",
    "optimizer": "A step of the optimizer",
    "replay": "Decisions recorded and told",
    "megatron": "A layer of Megatron-Core",
    "imbalance": "Replicated experts and uneven tokens",
    "replica_plan": "Planning the replicas of replicated experts",
    "replica_model": "What copying experts saves, by a cost model",
}


def campaign_page(records: Sequence[Record]) -> str:
    """Markdown: all cases in one table per part."""
    parts = ["# Benchmarks: layers and exchanges", METHOD, LIMIT, *_where(records)]
    for part, heading in SECTIONS.items():
        chosen = [record for record in records if record.part == part]
        if chosen:
            parts += [f"## {heading}", _section(chosen)]
    if weighed := [record for record in records if record.memory]:
        rows = [[case_words(record), *row] for record in weighed for row in memory_table(record)[1]]
        header = ["case", *memory_table(weighed[0])[0]]
        parts += ["## Memory of forward+backward", MEMORY, as_markdown(header, rows)]
    if absent := _absent(records):
        parts += ["## Not raced", as_markdown(["who", "why", "cases, the first"], absent)]
    return "\n\n".join([*parts, "## Commands", _commands(records)]) + "\n"


def record_page(records: Sequence[Record], about: str, table: Table = contestants_table, before: str = "") -> str:
    """Markdown: a section per processor, each record with all its contestants.

    about: what the case is. table: header and rows of a record. before: the page as it was, whose sections of other
    processors stay as they are.
    """
    found = re.split(rf"^{ON}(.+)\n", before, flags=re.MULTILINE)[1:]
    sections = dict(zip(found[::2], found[1::2], strict=True))
    for processor in dict.fromkeys(record.machine["processor"] for record in records):
        sections[processor] = _on([record for record in records if record.machine["processor"] == processor], table)
    own = [PEAK] if table is contestants_table else []
    parts = [f"# {TITLES[records[0].part]}", about, METHOD, *own]
    return "\n\n".join([*parts, *(f"{ON}{name}\n\n{text.strip()}" for name, text in sections.items())]) + "\n"


def _on(records: Sequence[Record], table: Table) -> str:
    """What was measured on one processor."""
    parts = _where(records)
    for record in records:
        parts += [f"### {case_words(record)}", as_markdown(*table(record))]
        parts += [MEMORY, as_markdown(*memory_table(record))] if record.memory else []
    return "\n\n".join([*parts, _commands(records)])


def report_page(part: str, about: str, found: str) -> str:
    """Markdown: what a part found that races nobody."""
    machine = describe()
    where = [f"Machine: {machine_words(machine)}.", f"Revision: `{machine['revision']}`."]
    return "\n\n".join([f"# {TITLES[part]}", about, *where, found, f"Command: `python -m benchmarks {part}`."]) + "\n"


def _where(records: Sequence[Record]) -> list[str]:
    lines = [f"Machine: {machine}." for machine in dict.fromkeys(machine_words(record.machine) for record in records)]
    revisions = ", ".join(
        f"`{each}`" for each in dict.fromkeys(record.machine["revision"] for record in records) if each
    )
    lines += [f"Revision: {revisions}."] if revisions else []
    shares = [share for record in records if (share := record.settings.get("others", 0.0)) > CALM]
    if shares:
        lines.append(
            f"**In {len(shares)} of {len(records)} cases other programs took more than {CALM:.0%} of the cores' time, "
            f"up to {max(shares):.0%}.**"
        )
    return lines


def _section(records: Sequence[Record]) -> str:
    mallocs = list(dict.fromkeys(race.malloc for record in records for race in record.races))
    header = ["case", "pass", "trimtab", *mallocs, "fastest peer", *mallocs, *(f"speed-up {m}" for m in mallocs)]
    header += ["**quoted**", "limit", *(f"x limit {m}" for m in mallocs), "**quoted**"]
    rows = [
        _row(record, entry, mode, mallocs)
        for record in records
        for entry in record.races[0].entries
        if entry.role == "ours"
        for mode in record.modes
    ]
    return as_markdown(header, rows)


def _row(record: Record, entry: Entry, mode: str, mallocs: Sequence[str]) -> list[str]:
    """One of ours in one mode. Who failed took for ever."""
    races = {race.malloc: race for race in record.races}
    place = record.races[0].entries.index(entry)
    own = {malloc: race.entries[place] for malloc, race in races.items()}
    peers = {malloc: race.peer(entry.group, mode) for malloc, race in races.items()}
    limits = {malloc: race.limit(entry.group, mode) for malloc, race in races.items()}
    ups = {malloc: race.speed_up(own[malloc], mode) for malloc, race in races.items()}
    overs = {malloc: race.over_limit(own[malloc], mode) for malloc, race in races.items()}
    failed = next((each.failed for each in own.values() if each.failed), "")
    group = "" if entry.group in ("", "balanced") else f", {entry.group}"
    row = [case_words(record) + group, mode, entry.name.partition(" @")[0].removeprefix("trimtab ")]
    row += [duration(_median(races.get(m), own.get(m), mode)) for m in mallocs]
    row += [next((peer[0].partition(" @")[0] for peer in peers.values() if peer), "")]
    row += [duration(peer[1]) if (peer := peers.get(m)) else "" for m in mallocs]
    row += [ratio(ups.get(m)) for m in mallocs]
    row += [_bold(failed, smallest(ups.values()) if None not in ups.values() else None)]
    limit = next((each for each in limits.values() if each), None)
    row += [f"{duration(limit.seconds)}, {limit.what}" if limit else ""]
    row += [ratio(overs.get(m)) for m in mallocs]
    return [*row, _bold(failed, largest(overs.values()) if None not in overs.values() else None)]


def _median(race: Race | None, entry: Entry | None, mode: str) -> float | None:
    return None if race is None or entry is None else race.median(entry, mode)


def _bold(failed: str, value: float | None) -> str:
    return "**failed**" if failed else "" if value is None else f"**{ratio(value)}**"


def _absent(records: Sequence[Record]) -> list[list[str]]:
    seen: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for entry in [entry for race in record.races for entry in race.entries if entry.failed is not None]:
            seen.setdefault((entry.name, entry.failed or ""), []).append(case_words(record))
    return [[name, reason, f"{len(set(cases))}: {cases[0]}"] for (name, reason), cases in seen.items()]


def _commands(records: Sequence[Record]) -> str:
    commands = dict.fromkeys(record.command for record in records)
    return "```sh\n" + "\n".join(commands) + "\n```"
