"""Names of the files that a run leaves, and words for people: what its data holds, how it ended."""

from __future__ import annotations

import itertools
import json
import shlex
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.checkpoint.folder import CONFIG, UNFINISHED, is_step, step_folder, step_of, whole_checkpoints
from trimtab.routing.loads import read_metrics

if TYPE_CHECKING:
    from trimtab.train.readers import Record

METRICS, HEATMAP, FINAL, MERGED, LOGS = "metrics.jsonl", "load.png", "final", "merged", "logs"
CHECKPOINTS, WRITTEN = "checkpoints", ".written"
"""WRITTEN: lies beside weights that are all written while the other files are copied."""
RUN = "run.json"
"""Marks an output folder as ours: the options of the run that wrote it."""
MOST_UNREAD = 4
"""Things that the one line on the data names."""
PERCENTILES = (5, 25, 50, 75, 95, 99, 100)


def best_step(metrics: Path, checkpoints: Iterable[Path]) -> int | None:
    """The step of the checkpoint with the lowest loss in evaluation; None if there was none."""
    held = {step_of(folder) for folder in checkpoints}
    evaluated = [record for record in read_metrics(metrics) if record["step"] in held and "eval_loss" in record]
    return min(((record["eval_loss"], record["step"]) for record in evaluated), default=(0.0, None))[1]


def closing_words(out: Path, unit: str, seconds: float, missing_picture: str | None) -> Iterator[str]:
    """Lines that say how the loss fell, how even the loads were, and where everything is."""
    adapter = (out / FINAL / "adapter_config.json").exists()
    model = out / MERGED if adapter else out / FINAL
    yield from _steps_taken(read_metrics(out / METRICS), unit, seconds)
    best = best_step(out / METRICS, whole_checkpoints(out / CHECKPOINTS))
    if best is not None:
        yield f"best    {step_folder(out / CHECKPOINTS, best)}"
    yield f"metrics {out / METRICS}"
    yield f"loads   {missing_picture or out / HEATMAP}"
    if adapter:
        yield f"adapter {out / FINAL}  (peft's, with the path of the model below)"
    if model.exists() or not adapter:
        yield f"model   {model}  (transformers opens it, without trimtab)"


def _steps_taken(records: Iterable[dict[str, Any]], unit: str, seconds: float) -> Iterator[str]:
    ends: list[dict[str, Any]] = []
    evaluated: list[dict[str, Any]] = []
    steps = 0
    for record in records:
        steps += 1
        ends = [*ends[:1], record]
        evaluated = [*evaluated[:1], record] if "eval_loss" in record else evaluated
    if not steps:  # of a run that was resumed at its end, without its metrics, to write the model
        return
    first, last, layers = ends[0]["loss"], ends[-1]["loss"], ends[-1]["layers"].values()
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
    if evaluated:
        began, ended = (f"{evaluated[n]['eval_loss']:.3f}" for n in (0, -1))
        yield f"eval    {began} -> {ended} nats, max_vio {evaluated[-1]['eval_max_vio']:.2f} in the worst layer"


def resume_command(out: Path, ranks: int | None) -> str:
    """The command that goes on with the run that writes to `out`."""
    return f"trimtab train --resume {shlex.quote(str(out))}" + (f" --nproc {ranks}" if ranks and ranks > 1 else "")


def finished(asked: Path) -> tuple[Path, dict[str, Any]] | None:
    """The folder and options of a run that has ended well, where `asked` is that folder, its checkpoints' or its last
    checkpoint: there is nothing to go on with. None for any other."""
    out = asked.parent.parent if is_step(asked) else asked.parent if asked.name == CHECKPOINTS else asked
    if not ((out / FINAL).exists() and (out / RUN).is_file()):
        return None
    held = whole_checkpoints(out / CHECKPOINTS)
    if is_step(asked) and held and held[-1].name != asked.name:
        return None
    options: dict[str, Any] = json.loads((out / RUN).read_text(encoding="utf-8"))
    return out, options


def unnamed_model(out: Path, whole: bool = False) -> str | None:
    """Words on weights that a run wrote and did not come to name `final`; None where there are none. whole: only where
    none of them lack, which the files tell that are written behind them."""
    folder = out / f"{FINAL}{UNFINISHED}"
    found = {path.name for path in folder.glob("*")}
    if not any(name.endswith(".safetensors") for name in found):
        return None
    if not found & {WRITTEN, CONFIG, "adapter_config.json"}:
        return None if whole else f"{folder} holds a part of the weights, which no program opens"
    return (
        f"{folder} holds all that was trained: put those files of the model's folder beside it that it lacks "
        f"({CONFIG}, the tokenizer's), and name it {out / FINAL}"
    )


@dataclass
class Tally:
    """Counts of the records of one kind in one file, or in all plain text files."""

    learned: int = 0
    truncated: int = 0
    lengths: array[int] = field(default_factory=lambda: array("I"))
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def add(self, length: int, learned: int) -> None:
        if not length:
            self.left_out["empty"] += 1
            return
        self.lengths.append(length)
        self.learned += learned


class DataReport:
    """Contents of a group of files: `tallies` by file and kind, a sample of each kind, `blocks`, and what is unread."""

    def __init__(self, unread: Iterable[str]) -> None:
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.samples: dict[str, tuple[str, tuple[list[int], list[int]]]] = {}
        self.blocks = 0
        self.unread = list(unread)
        self._odd, self._first = Counter[str](), dict[str, str]()

    def see(self, record: Record) -> None:
        """Note what of a record is not read, or not as it stands."""
        for what, n in (+record.odd).items():
            self._odd[what] += n
            self._first.setdefault(what, record.place)

    @property
    def odd(self) -> list[str]:
        """What of records is not read, or not as it stands, in words, with how often and where first."""
        return [f"{n:,} {what} (first in {self._first[what]})" for what, n in self._odd.items()]

    def of(self, record: Record) -> Tally:
        where = "plain text files" if record.place == str(record.path) else str(record.path)
        return self.tallies.setdefault((where, record.kind), Tally())

    def summary(self) -> str:
        """One line: what is read, cut, left out and not read."""
        found, left_out = Counter[str](), Counter[str]()
        for (_, kind), tally in self.tallies.items():
            found[kind] += len(tally.lengths)
            left_out += tally.left_out
        every = self.tallies.values()
        tokens, learned, cut = (sum(getattr(t, name) for t in every) for name in ("tokens", "learned", "truncated"))
        records = " and ".join(f"{n:,} {kind}(s)" for kind, n in found.items() if n) or "nothing"
        parts = {
            f"{records}, {tokens:,} tokens, {learned:,} of them learned, in {self.blocks:,} block(s)": True,
            f"cut to a block: {cut:,}": cut, f"left out: {_listed(left_out)}": left_out,
            f"odd: {_first(self.odd)}": self.odd, f"not read: {_first(self.unread)}": self.unread,
        }  # fmt: skip
        return "; ".join(part for part, there in parts.items() if there)

    def details(self, tokenizer: Any) -> Iterator[str]:
        """Lines by file and kind, with percentiles of lengths; and a sample of each kind, what is learned in ⟦ ⟧."""
        for (where, kind), tally in self.tallies.items():
            sizes = sorted(tally.lengths)
            yield f"{where}: {len(sizes):,} {kind}(s), {tally.tokens:,} tokens, {tally.learned:,} of them learned"
            if sizes:
                marks = [f"{sizes[(len(sizes) - 1) * p // 100]:,} ({p} %)" for p in PERCENTILES]
                yield f"  tokens in one: {', '.join(marks)}"
            if tally.truncated:
                yield f"  cut to a block: {tally.truncated:,}"
            if tally.left_out:
                yield f"  left out: {_listed(tally.left_out)}"
        yield from (f"odd: {word}" for word in self.odd)
        yield from (f"not read: {word}" for word in self.unread)
        for kind, (place, (ids, labels)) in self.samples.items():
            yield f"a {kind}, {place}, what is learned in ⟦ ⟧:"
            shown = ""
            for learned, run in itertools.groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] >= 0):
                text = tokenizer.decode([token for token, _ in run])
                shown += f"⟦{text}⟧" if learned else text
            yield shown


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n:,} {why}" for why, n in counts.items())


def _first(words: list[str]) -> str:
    more = f" and {len(words) - MOST_UNREAD} more" if len(words) > MOST_UNREAD else ""
    return ", ".join(words[:MOST_UNREAD]) + more
