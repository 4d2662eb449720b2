"""What a run leaves, by name, and what is for people: what its data holds, the closing words."""

from __future__ import annotations

import itertools
import shlex
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import step_of, whole_checkpoints
from trimtab.routing.load_picture import read_metrics
from trimtab.train.records import Record

METRICS, HEATMAP, FINAL, MERGED, LOGS = "metrics.jsonl", "load.png", "final", "merged", "logs"
RUN = "run.json"
"""Marks an output folder as ours: the options of the run that wrote it."""


OPENS = "AutoModelForCausalLM.from_pretrained opens it, without trimtab"
MOST_UNREAD = 4
"""Things that the one line on the data names."""
PERCENTILES = (5, 25, 50, 75, 95, 99, 100)


def best_step(metrics: Path, checkpoints: Iterable[Path]) -> int | None:
    """The step of the checkpoint with the lowest loss in evaluation; None if there was none."""
    held = {step_of(folder) for folder in checkpoints}
    records = read_metrics(metrics)
    found = [
        (record["eval_loss"], record["step"]) for record in records if record["step"] in held and "eval_loss" in record
    ]
    return min(found)[1] if found else None


def closing_words(out: Path, *, unit: str, seconds: float, missing_picture: str | None) -> str:
    """Where everything is and what the loss did."""
    adapter = (out / FINAL / "adapter_config.json").exists()
    whole = out / MERGED if adapter else out / FINAL
    return "\n".join(
        [
            *_steps_taken(read_metrics(out / METRICS), unit, seconds),
            *_best(out),
            f"metrics {out / METRICS}",
            f"loads   {missing_picture or out / HEATMAP}",
            *([f"adapter {out / FINAL}  (peft's, with the path of the model below)"] if adapter else []),
            *([f"model   {whole}  ({OPENS})"] if whole.exists() or not adapter else []),
        ]
    )


def _steps_taken(records: Iterable[dict[str, Any]], unit: str, seconds: float) -> Iterator[str]:
    """Nothing of a run that was resumed at its end, without its metrics, to write the model."""
    start, end, steps = None, None, 0
    for end in records:
        start, steps = start or end, steps + 1
    if start is None or end is None:
        return
    first, last, layers = start["loss"], end["loss"], end["layers"].values()
    worst = max(layer["max_vio"] for layer in layers)
    dead = sum(layer["dead_experts"] for layer in layers)
    yield f"loss    {first:.3f} -> {last:.3f} nats per {unit} in {steps} steps, {seconds:.0f} s"
    yield f"balance max_vio {worst:.2f} in the worst layer, {dead} expert(s) without a token in the last step"
    if copied := [layer["replicated"] for layer in layers if "replicated" in layer]:
        before, after = (max(layer[f"busiest_{when}"] for layer in copied) for when in ("before", "after"))
        yield (
            f"ranks   the busiest had {before:.2f} times the mean rows in the worst layer and computed {after:.2f}, by "
            f"{sum(layer['replicas'] for layer in copied)} replicas of experts in the last step"
        )


def _best(out: Path) -> Iterator[str]:
    evaluated = [record for record in read_metrics(out / METRICS) if "eval_loss" in record]
    if evaluated:
        first, last = (f"{record['eval_loss']:.3f}" for record in (evaluated[0], evaluated[-1]))
        yield f"eval    {first} -> {last} nats, max_vio {evaluated[-1]['eval_max_vio']:.2f} in the worst layer"
    best = best_step(out / METRICS, whole_checkpoints(out / "checkpoints"))
    if best is not None:
        yield f"best    {out / 'checkpoints' / f'step-{best:08d}'}"


def stopping_words(out: Path, *, step: int, steps: int, ranks: int) -> str:
    """What a run says that ends before its schedule does."""
    more = f" --nproc {ranks}" if ranks > 1 else ""
    return f"stopped after step {step} of {steps}; go on with: trimtab train --resume {shlex.quote(str(out))}{more}"


@dataclass
class Tally:
    """What became of the records of one kind in one file, or in all plain text files."""

    tokens: int = 0
    learnt: int = 0
    truncated: int = 0
    lengths: array[int] = field(default_factory=lambda: array("I"))
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, length: int, learnt: int) -> None:
        """Count a record of so many tokens, of which so many are learnt; an empty one is left out."""
        if not length:
            self.left_out["empty"] += 1
            return
        self.lengths.append(length)
        self.tokens += length
        self.learnt += learnt


class DataReport:
    """What a group of files held: `tallies` by file and kind, what is `unread`, a sample of each kind, `blocks`."""

    def __init__(self, unread: Iterable[str]) -> None:
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.unread = list(unread)
        self.samples: dict[str, tuple[str, tuple[list[int], list[int]]]] = {}
        self.blocks = 0

    def of(self, record: Record) -> Tally:
        """The tally that a record counts in."""
        where = "plain text files" if record.place == str(record.path) else str(record.path)
        return self.tallies.setdefault((where, record.kind), Tally())

    def add_unread(self, path: Path, what: Iterable[str]) -> None:
        """Note what of a file is not read."""
        self.unread.append(f"{', '.join(sorted(what))} of {path}")

    def summary(self) -> str:
        """What is read, cut, left out and not read, in one line."""
        found, left_out, tokens, learnt, cut = Counter[str](), Counter[str](), 0, 0, 0
        for (_, kind), tally in self.tallies.items():
            found[kind] += len(tally.lengths)
            left_out += tally.left_out
            tokens, learnt, cut = tokens + tally.tokens, learnt + tally.learnt, cut + tally.truncated
        records = " and ".join(f"{n:,} {kind}(s)" for kind, n in found.items() if n) or "nothing"
        parts = [f"{records}, {tokens:,} tokens, {learnt:,} of them learnt, in {self.blocks:,} block(s)"]
        if cut:
            parts.append(f"cut to a block: {cut:,}")
        if left_out:
            parts.append(f"left out: {_listed(left_out)}")
        if self.unread:
            more = f" and {len(self.unread) - MOST_UNREAD} more" if len(self.unread) > MOST_UNREAD else ""
            parts.append(f"not read: {', '.join(self.unread[:MOST_UNREAD])}{more}")
        return "; ".join(parts)

    def details(self, tokenizer: Any) -> Iterator[str]:
        """By file and kind, with the percentiles of lengths; and a sample of each kind, what is learnt in ⟦ ⟧."""
        for (where, kind), tally in self.tallies.items():
            sizes = sorted(tally.lengths)
            yield f"{where}: {len(sizes):,} {kind}(s), {tally.tokens:,} tokens, {tally.learnt:,} of them learnt"
            if sizes:
                marks = [f"{sizes[(len(sizes) - 1) * p // 100]:,} ({p} %)" for p in PERCENTILES]
                yield f"  tokens in one: {', '.join(marks)}"
            if tally.truncated:
                yield f"  cut to a block: {tally.truncated:,}"
            if tally.left_out:
                yield f"  left out: {_listed(tally.left_out)}"
        yield from (f"not read: {word}" for word in self.unread)
        for kind, (place, (ids, labels)) in self.samples.items():
            yield f"a {kind}, {place}, what is learnt in ⟦ ⟧:"
            shown = ""
            for learnt, run in itertools.groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] >= 0):
                text = tokenizer.decode([token for token, _ in run])
                shown += f"⟦{text}⟧" if learnt else text
            yield shown


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n:,} {why}" for why, n in counts.items())
