"""docs/benchmarks.md: every number that was measured, its bar, the machine and the command."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.finding import Finding, findings, plain
from benchmarks.judged import PEER, Judged, judge_bars, least_ratios, memory_ratios
from benchmarks.machine import words
from benchmarks.result import Record
from benchmarks.table import as_markdown, duration, ratio, size
from benchmarks.words import case_words

METHOD = """\
Every contestant lives in processes of its own, one per rank, on the same cores, and they take turns: A B C, C B A, and
so on. Before the first turn the output and all gradients of a layer, and what an exchange brings home both ways, are
compared with plain formulas, and loss and gradients of a training step with those of stock transformers; wrong numbers
do not race. (Kernels by themselves are not judged here: those in use have passed their self-test.) Each case is raced
with malloc as it comes (*default*) and with one that keeps what it is given (*tuned*: `MALLOC_MMAP_THRESHOLD_`,
`MALLOC_TRIM_THRESHOLD_`), in fresh processes; the smaller speed-up and the larger multiple of the limit are quoted.
Times are medians over the steps of all turns, of the slowest rank. Ratios are medians over the turns of what the ratio
was within a turn: other users of the processor make it now faster, now slower by half. *forward* runs without a graph.
*in place*: gradients of parameters are added to what is there, trimtab's into `main_grad`, peers' into `.grad`.

*speed-up* is the fastest peer's time over trimtab's. *x limit* is trimtab's time over the limit of the same race, which
is the longer of dense GEMMs of the same FLOPs (all rows at once, into memory that is there; of bf16 and float32 the
faster) and the fewest bytes (weights, tokens and gradients, once each way) over the measured speed of a copy. With
ranks the raw exchange of the same rows is added to the GEMMs. The shapes D, F, E, K: A is 512, 256, 64, 8; B is 1024,
512, 32, 4; C is 1024, 2816, 8, 2. Tokens are per rank. Where several transports raced, the fastest stands for trimtab
under *What was asked for*, and the worst case there names it.

*Dispatch and combine*: transformers' combine weighs and sums the slots of a token, and its backward makes the gradients
of the weights; trimtab's experts do both, so its exchange has neither to do."""

LIMIT = """\
*at the limit*: what would be found of a layer that took exactly as long as the limit in every case; its worst case may
be another one. Where that is less than what is asked, the fastest peer is too near to the limit for the bar."""

OTHERS = """\
Of transformers' other implementations, measured apart from this page, `eager` takes 10 to 150 times the limit in
forward+backward, for it builds a gradient of full size per expert, and `batched_mm` takes minutes;
`trimtab bench layer --peers` races any."""

MEMORY = """\
Peak bytes beyond parameters and inputs. *resident*: growth of the process's memory, with what kernels and libraries
keep; *tensors*: what PyTorch's storages add up to, without the pages that compiled kernels own. Gradients of parameters
and inputs, the same bytes for everyone, are among them; the last two columns leave them out. *least possible*: the
gradients alone over all that grouped_mm holds (resident, tensors); where it is above the bar, nobody can meet the bar
with gradients."""

EARLIER = """\
These numbers are not this version's: the sources that they were measured with have changed since, or are unknown. They
count for no bar above. `trimtab bench all` measures them anew."""

GPU_PAGE = "benchmarks-gpu.md"
"""Beside this page: what `python -m benchmarks.gpu --out` wrote."""

SECTIONS = {
    "layer": "One experts layer",
    "kernels": "Kernels",
    "exchange": "Dispatch and combine",
    "train": "Training steps",
}


def page(
    records: Sequence[Record], *, earlier: Sequence[Record] = (), chart: str | None = None, gpu: str | None = None
) -> str:
    """Markdown.

    records: measured with these sources. earlier: with others. chart, gpu: addresses of a picture, of another page.
    """
    parts = ["# Benchmarks", METHOD, _peers(records)]
    parts += [_machines([*records, *earlier]), _sources(records, earlier)]
    parts += [f"What was measured on a GPU is in [{gpu}]({gpu})."] if gpu else []
    parts += [f"![time over the limit]({chart})"] if chart else []
    parts += ["## What was asked for", LIMIT, _bars(records), *_results(records, "##")]
    if earlier:
        parts += ["## Measured with earlier sources", EARLIER, *_results(earlier, "###")]
    return "\n\n".join(part for part in parts if part) + "\n"


def _results(records: Sequence[Record], level: str) -> list[str]:
    """All tables, under headings of this level."""
    parts = []
    for part, heading in SECTIONS.items():
        chosen = [record for record in records if record.part == part]
        if chosen:
            parts += [f"{level} {heading}", _section(chosen)]
    if any(record.memory for record in records):
        parts += [f"{level} Memory of forward+backward", _memory(records)]
    if absent := _absent(records):
        parts += [f"{level} Not raced", absent]
    return [*parts, *([f"{level} Commands", _commands(records)] if records else [])]


def _sources(records: Sequence[Record], earlier: Sequence[Record]) -> str:
    digests = ", ".join(f"`{d}` ({part})" for part, d in dict.fromkeys((r.part, r.sources) for r in records))
    text = f"Cases measured with the sources that this page was written from: {len(records)}"
    text += f" (digest {digests})." if digests else "."
    if earlier:
        text += f" **With other sources: {len(earlier)}, at the end, counted by no bar.**"
    return text


def _peers(records: Sequence[Record]) -> str:
    """Who raced, and what that leaves open."""
    raced: dict[str, list[str]] = {}
    for record in records:
        ranks = int(record.case.get("ranks", 1))
        where = f"{record.part} on {'several ranks' if ranks > 1 else 'one rank'}"
        peers = (plain(e.name) for race in record.races for e in race.entries if e.role == "peer" and e.seconds)
        for name in dict.fromkeys(peers):
            if name not in raced.setdefault(where, []):
                raced[where].append(name)
    if not raced:
        return ""
    who = "; ".join(f"{where}: {', '.join(f'`{name}`' for name in names)}" for where, names in raced.items())
    return f"The fastest peer is the fastest of those that raced; of others the tables say nothing. {who}. {OTHERS}"


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
            bar.where, bar.asked, _found(bar), ratio(bar.limit), str(bar.cases), bar.at,
            "" if bar.cases == 0 else "yes" if bar.met else "**no**",
        ]
        for bar in judge_bars(records)
    ]  # fmt: skip
    return as_markdown(["where", "asked", "found (worst)", "at the limit", "cases", "worst case", "met"], rows)


def _found(bar: Judged) -> str:
    if bar.failed:
        return f"**failed**: {bar.failed}"
    return "not measured" if bar.found is None else ratio(bar.found)


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
        row += [f.peer_name or f.peer_failed, *(duration(f.peer.get(m)) for m in mallocs)]
        row += [*(ratio(f.speed_ups.get(m)) for m in mallocs), _quoted(f.speed_up, f.failed or f.peer_failed)]
    if limited:
        limit = next(iter(f.limits.values()), None)
        row += [f.limit_failed if limit is None else f"{duration(limit.seconds)}, {limit.what}"]
        row += [*(ratio(f.over_limits.get(m)) for m in mallocs), _quoted(f.over_limit, f.failed or f.limit_failed)]
    return row


def _quoted(value: float | None, failed: str) -> str:
    return "**failed**" if failed else "" if value is None else f"**{ratio(value)}**"


def _memory(records: Sequence[Record]) -> str:
    kinds = ("resident", "tensors")
    rows = []
    for record in records:
        least = ", ".join(ratio(value) for value in least_ratios(record).values())
        for name, found in record.memory.items():
            row = [case_words(record), name, *(size(found.get(kind)) for kind in (*kinds, "gradients"))]
            if "failed" in found:
                row[2] = f"**failed**: {found['failed']}"
            for gradients in (True, False):
                over = memory_ratios(record, name, gradients=gradients)
                row += [ratio(over.get(kind)) for kind in kinds]
                row += [least] if gradients else []
            rows.append(row)
    header = ["case", "who", *kinds, "gradients", *(f"{kind} over {PEER}" for kind in kinds), "least possible"]
    header += [f"{kind} without gradients" for kind in kinds]
    return f"{MEMORY}\n\n{as_markdown(header, rows)}"


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
