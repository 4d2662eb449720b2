"""Bars judged by what was measured: the worst case counts, and one that failed is the worst.

A case where trimtab failed or gave wrong numbers keeps a bar from being met, whatever the others say; so does one where
a peer or a limit failed, for there is nothing to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.bars import BARS, Bar
from benchmarks.finding import Finding, findings, plain, times
from benchmarks.result import Record, largest
from benchmarks.words import case_words

IMBALANCE, MEMORY = 1.15, 0.6
PEER = "grouped_mm"
"""Whose memory is compared with."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """What one case says of a bar, and would say of the limit. failed: why its number says nothing."""

    number: float | None
    at: str
    failed: str = ""
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A bar and what was found: the worst case and how many there are.

    found: None where nothing was measured or something failed. failed: what, and why. limit: what would be found of a
    layer that took as long as the limit in every case, None where that says nothing.
    """

    where: str
    asked: str
    found: float | None
    at: str
    cases: int
    met: bool
    failed: str = ""
    limit: float | None = None


def judge_bars(records: Sequence[Record]) -> list[Judged]:
    """Every bar, in order. Where several transports raced a case, the fastest stands for trimtab, if none failed."""
    found = _best(findings(records))
    return [_judged(bar, [f for f in found if bar.applies(f)]) for bar in BARS] + [
        _imbalance(found), _memory(records, gradients=True), _memory(records, gradients=False)
    ]  # fmt: skip


def _best(found: Sequence[Finding]) -> list[Finding]:
    """One per case, group, mode and kernels: one that failed, else the fastest."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for f in found:
        kernels = f.name.split()[1] if f.record.part == "layer" else ""
        alike.setdefault((f.record.part, str(sorted(f.case.items())), f.group, f.mode, kernels), []).append(f)
    return [min(each, key=lambda f: (not f.failed, max(f.own.values()))) for each in alike.values()]


def _judged(bar: Bar, found: Sequence[Finding]) -> Judged:
    limited, mean = bar.quantity == "x limit", bar.quantity == "mean speed-up"
    values = []
    for f in found:
        number = f.over_limit if limited else f.speed_up
        failed = f.failed or (f.limit_failed if limited else f.peer_failed)
        if failed or number is not None:
            values.append(Value(number=number, at=_at(f), failed=failed, limit=None if limited else f.limit_speed_up))
    if limited:
        return _verdict(values, where=bar.where, most=bar.asked, of="the limit")
    return _verdict(values, where=bar.where, least=bar.asked, of="the fastest peer", mean=mean)


def _verdict(
    values: Sequence[Value], *, where: str, of: str, least: float = 0.0, most: float = math.inf, mean: bool = False
) -> Judged:
    """Of least and most one is given."""
    asked = f">= {least}x {of}" if least else f"<= {most}x {of}"
    asked += ", geometric mean" if mean else ""
    for v in values:
        if v.failed:
            return Judged(where=where, asked=asked, found=None, at=v.at, cases=len(values), met=False, failed=v.failed)
    numbers = [v.number for v in values if v.number is not None]
    limits = [v.limit for v in values if v.limit is not None]
    if not numbers:
        return Judged(where=where, asked=asked, found=None, at="", cases=0, met=False)
    all_of = geometric_mean if mean else min if least else max
    found, limit = all_of(numbers), all_of(limits) if len(limits) == len(numbers) else None
    at = "" if mean else next(v.at for v in values if v.number == found)
    met = least <= found <= most
    return Judged(where=where, asked=asked, found=found, at=at, cases=len(values), met=met, limit=limit)


def _imbalance(found: Sequence[Finding]) -> Judged:
    """zipf and hot over balanced, in the same race on one rank."""
    on_one = [f for f in found if f.record.part == "layer" and f.case["ranks"] == 1]
    level = {(id(f.record), f.mode, f.name): f for f in on_one if f.group == "balanced"}
    values = []
    for f in on_one:
        base = level.get((id(f.record), f.mode, f.name))
        if f.group in ("zipf", "hot") and base is not None:
            failed = f.failed or base.failed
            number = None if failed else largest(times(f, base))
            values.append(Value(number=number, at=f"{f.group}, {_at(f)}", failed=failed))
    return _verdict(values, where="time of hot and zipf, one rank", most=IMBALANCE, of="balanced")


def _memory(records: Sequence[Record], *, gradients: bool) -> Judged:
    """trimtab's bytes over grouped_mm's, by whichever count is worse."""
    values = []
    for record in records:
        for name in [n for n in record.memory if n.startswith("trimtab auto") and PEER in record.memory]:
            who = {plain(each): record.memory[each].get("failed") for each in (name, PEER)}
            failed = next((f"{each}: {why}" for each, why in who.items() if why), "")
            ratios = memory_ratios(record, name, gradients=gradients)
            worst = max(ratios, key=lambda kind: ratios[kind], default="")
            at = f"{worst}, {case_words(record)}" if worst else case_words(record)
            values.append(Value(number=ratios.get(worst), at=at, failed=failed))
    where = "peak bytes of forward+backward beyond parameters" + (" and gradients" if not gradients else "")
    return _verdict(values, where=where, most=MEMORY, of=PEER)


def memory_ratios(record: Record, name: str, *, gradients: bool) -> dict[str, float]:
    """Bytes of a contestant over grouped_mm's, "resident" and "tensors"; with or without the gradients' own bytes."""
    own, peer = record.memory.get(name, {}), record.memory.get(PEER, {})
    ratios: dict[str, float] = {}
    for kind in ("resident", "tensors"):
        if kind in own and kind in peer:
            mine, theirs = (held[kind] - (0 if gradients else held["gradients"]) for held in (own, peer))
            ratios[kind] = max(mine, 0) / max(theirs, 1)
    return ratios


def least_ratios(record: Record) -> dict[str, float]:
    """The gradients alone over all of grouped_mm's bytes: nobody's ratio with gradients can be smaller."""
    peer = record.memory.get(PEER, {})
    return {kind: peer["gradients"] / max(peer[kind], 1) for kind in ("resident", "tensors") if kind in peer}


def _at(f: Finding) -> str:
    exchanged = f.record.part in ("layer", "exchange") and f.case["ranks"] > 1
    return f"{case_words(f.record)}, {f.mode}" + (f", {f.name.split()[-1]}" if exchanged else "")
