"""What the project wants to show, each with the number that counts: the worst case of those it speaks of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.bench.finding import Finding, findings
from trimtab.bench.result import Record
from trimtab.bench.subject import BOTH, FORWARD

FINE = ([512, 256, 64, 8], [1024, 512, 32, 4])
COARSE = ([1024, 2816, 8, 2],)
LARGE = (2048, 8192)

Quantity = Literal["speed-up", "x limit", "mean speed-up"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """asked: the least speed-up or the largest multiple of the limit."""

    where: str
    quantity: Quantity
    asked: float
    applies: Callable[[Finding], bool]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A bar and what was found: the worst case and how many there are; None where nothing was measured."""

    where: str
    asked: str
    found: float | None
    at: str
    cases: int
    met: bool


def _layer(
    *, dtype: str = "", mode: str = "", shapes: Sequence[list[int]] = (), tokens: Sequence[int] = (),
    kernels: str = "auto", many_ranks: bool = False, in_place: bool | None = False,
) -> Callable[[Finding], bool]:  # fmt: skip
    """Findings of the balanced layer with these; empty means any."""

    def applies(f: Finding) -> bool:
        c = f.case
        return (
            f.record.part == "layer"
            and f.group == "balanced"
            and f.name.split()[1] == kernels
            and (c["ranks"] > 1) == many_ranks
            and dtype in ("", c["dtype"])
            and mode in ("", f.mode)
            and (not shapes or list(c["shape"]) in shapes)
            and (not tokens or c["tokens"] in tokens)
            and in_place in (None, bool(c["in_place"]))
        )

    return applies


def _exchange(f: Finding) -> bool:
    return f.record.part == "exchange" and f.case["tokens"] == 8192


BARS = (
    Bar(where="bf16, forward+backward, 2,048 and 8,192 tokens, A and B", quantity="speed-up", asked=2.5,
        applies=_layer(dtype="bf16", mode=BOTH, shapes=FINE, tokens=LARGE)),
    Bar(where="bf16, forward+backward, 2,048 and 8,192 tokens, A and B", quantity="x limit", asked=1.5,
        applies=_layer(dtype="bf16", mode=BOTH, shapes=FINE, tokens=LARGE)),
    Bar(where="bf16, forward+backward, 2,048 and 8,192 tokens, C", quantity="speed-up", asked=1.3,
        applies=_layer(dtype="bf16", mode=BOTH, shapes=COARSE, tokens=LARGE)),
    Bar(where="bf16, forward+backward, 2,048 and 8,192 tokens, C", quantity="x limit", asked=1.4,
        applies=_layer(dtype="bf16", mode=BOTH, shapes=COARSE, tokens=LARGE)),
    Bar(where="bf16, forward, 2,048 and 8,192 tokens, A and B", quantity="speed-up", asked=3.0,
        applies=_layer(dtype="bf16", mode=FORWARD, shapes=FINE, tokens=LARGE)),
    Bar(where="bf16, forward, 2,048 and 8,192 tokens, C", quantity="speed-up", asked=1.5,
        applies=_layer(dtype="bf16", mode=FORWARD, shapes=COARSE, tokens=LARGE)),
    Bar(where="bf16, forward, 2,048 and 8,192 tokens, A, B and C", quantity="x limit", asked=1.4,
        applies=_layer(dtype="bf16", mode=FORWARD, tokens=LARGE)),
    Bar(where="forward+backward, 256 tokens", quantity="speed-up", asked=1.3,
        applies=_layer(mode=BOTH, tokens=(256,))),
    Bar(where="forward+backward, 256 tokens, gradients in place", quantity="speed-up", asked=1.8,
        applies=_layer(mode=BOTH, tokens=(256,), in_place=True)),
    Bar(where="fp32, forward+backward, 2,048 and 8,192 tokens", quantity="x limit", asked=1.3,
        applies=_layer(dtype="fp32", mode=BOTH, tokens=LARGE)),
    Bar(where="fp32, any pass, any size: never slower", quantity="speed-up", asked=1.0,
        applies=_layer(dtype="fp32", in_place=None)),
    Bar(where="stock PyTorch alone, bf16, forward+backward, 2,048 and 8,192 tokens", quantity="mean speed-up",
        asked=1.4, applies=_layer(dtype="bf16", mode=BOTH, tokens=LARGE, kernels="loop")),
    Bar(where="stock PyTorch alone, bf16, any pass, any size: never slower", quantity="speed-up", asked=1.0,
        applies=_layer(dtype="bf16", kernels="loop")),
    Bar(where="2 and 4 ranks, forward+backward, A and B", quantity="speed-up", asked=2.0,
        applies=_layer(mode=BOTH, shapes=FINE, many_ranks=True)),
    Bar(where="2 and 4 ranks, forward+backward, C", quantity="speed-up", asked=1.4,
        applies=_layer(mode=BOTH, shapes=COARSE, many_ranks=True)),
    Bar(where="dispatch + combine, 8,192 tokens, over raw all-to-all and a copy", quantity="x limit", asked=1.25,
        applies=_exchange),
)  # fmt: skip
IMBALANCE, MEMORY = 1.15, 0.6


def judge_bars(records: Sequence[Record]) -> list[Judged]:
    """Every bar, in order. Where several transports raced a case, the fastest stands for trimtab."""
    found = _best(findings(records))
    return [_judged(bar, [f for f in found if bar.applies(f)]) for bar in BARS] + [
        _imbalance(found), _memory(records, gradients=True), _memory(records, gradients=False)
    ]  # fmt: skip


def _best(found: Sequence[Finding]) -> list[Finding]:
    """One per case, group, mode and kernels."""
    best: dict[tuple[str, ...], Finding] = {}
    for f in found:
        kernels = f.name.split()[1] if f.record.part == "layer" else ""
        key = (str(f.record.part), str(sorted(f.case.items())), f.group, f.mode, kernels)
        if key not in best or max(f.own.values()) < max(best[key].own.values()):
            best[key] = f
    return list(best.values())


def _judged(bar: Bar, found: Sequence[Finding]) -> Judged:
    wanted = f">= {bar.asked}x the fastest peer" if bar.quantity != "x limit" else f"<= {bar.asked}x the limit"
    values = [(f.over_limit if bar.quantity == "x limit" else f.speed_up, f) for f in found]
    known = [(value, f) for value, f in values if value is not None]
    if not known:
        return Judged(where=bar.where, asked=wanted, found=None, at="", cases=0, met=False)
    if bar.quantity == "mean speed-up":
        mean = math.exp(sum(math.log(value) for value, _ in known) / len(known))
        return Judged(
            where=bar.where, asked=f"{wanted}, geometric mean", found=mean, at="", cases=len(known),
            met=mean >= bar.asked,
        )  # fmt: skip
    least = bar.quantity == "speed-up"
    value, f = (min if least else max)(known, key=lambda one: one[0])
    met = value >= bar.asked if least else value <= bar.asked
    return Judged(where=bar.where, asked=wanted, found=value, at=_at(f), cases=len(known), met=met)


def _imbalance(found: Sequence[Finding]) -> Judged:
    """zipf and hot over balanced, in the same race on one rank."""
    on_one = [f for f in found if f.record.part == "layer" and f.case["ranks"] == 1]
    level = {(id(f.record), f.mode, f.name): f for f in on_one if f.group == "balanced"}
    ratios = [
        (max(f.own[m] / base.own[m] for m in f.own if m in base.own), f)
        for f in on_one
        if f.group in ("zipf", "hot") and (base := level.get((id(f.record), f.mode, f.name))) is not None
    ]
    value, worst = max(ratios, key=lambda one: one[0], default=(None, None))
    return Judged(
        where="hot and zipf over balanced, one rank", asked=f"<= {IMBALANCE}x the time", found=value,
        at="" if worst is None else f"{worst.group}, {_at(worst)}", cases=len(ratios),
        met=value is not None and value <= IMBALANCE,
    )  # fmt: skip


def _memory(records: Sequence[Record], *, gradients: bool) -> Judged:
    """trimtab's bytes over grouped_mm's, by whichever count is worse."""
    ratios = [
        (value, f"{kind}, {case_words(record)}")
        for record in records
        for name in record.memory
        if name.startswith("trimtab auto")
        for kind, value in memory_ratios(record, name, gradients=gradients).items()
    ]
    value, at = max(ratios, default=(None, ""))
    return Judged(
        where="peak bytes of forward+backward beyond parameters" + (" and gradients" if not gradients else ""),
        asked=f"<= {MEMORY}x grouped_mm", found=value, at=at, cases=len({at for _, at in ratios}),
        met=value is not None and value <= MEMORY,
    )  # fmt: skip


def memory_ratios(record: Record, name: str, *, gradients: bool) -> dict[str, float]:
    """Bytes of a contestant over grouped_mm's, "resident" and "tensors"; with or without the gradients' own bytes."""
    own, peer = record.memory.get(name, {}), record.memory.get("grouped_mm", {})
    ratios: dict[str, float] = {}
    for kind in ("resident", "tensors"):
        if kind in own and kind in peer:
            mine, theirs = (held[kind] - (0 if gradients else held["gradients"]) for held in (own, peer))
            ratios[kind] = max(mine, 0) / max(theirs, 1)
    return ratios


def _at(f: Finding) -> str:
    return f"{case_words(f.record)}, {f.mode}"


def case_words(record: Record) -> str:
    """A case in a few words."""
    c, names = record.case, {(512, 256, 64, 8): "A", (1024, 512, 32, 4): "B", (1024, 2816, 8, 2): "C"}
    words = [names.get(tuple(c["shape"]), ",".join(map(str, c["shape"])))] if "shape" in c else [str(c.get("preset"))]
    words += [str(c["dtype"])] if "dtype" in c else []
    for name in ("tokens", "threads", "ranks"):
        if name in c and (name != "ranks" or c[name] > 1):
            words.append(f"{c[name]} {name if c[name] != 1 else name.removesuffix('s')}")
    return ", ".join([*words, *(["in place"] if c.get("in_place") else [])])
