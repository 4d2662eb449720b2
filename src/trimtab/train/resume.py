"""Checkpoints of a run, and going on from one: what a run was made of comes from there, and is held against it.

The order of the data, the batches of a step and the schedule follow from FIXED options, the data's files and the
number of ranks that read different data. How those ranks share the model is free: the state is the same bit for bit,
and the sums that follow may be rounded otherwise. Importing this imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.checkpoint import folder as on_disk
from trimtab.errors import ConfigError, InputError, TrimtabError
from trimtab.train.autosave import MARK, Autosave, remove_unasked
from trimtab.train.config import FIXED, OPTIONS, TrainConfig, flag_of
from trimtab.train.presets import PRESETS
from trimtab.train.report import CHECKPOINTS, FINAL, HEATMAP, MERGED, METRICS, best_step, resume_command, unnamed_model
from trimtab.train.sources import Group

if TYPE_CHECKING:
    from trimtab.checkpoint.save_load import Loaded

_COUNTS = ("last_epoch", "_step_count")
"""State of a schedule beside the groups' rates, which the optimizer's state has."""


def resumed(given: dict[str, Any]) -> TrainConfig:
    """The configuration of a run that goes on: the checkpoint's, with those of `given`, by name, that may change;
    `resume` is a run's folder, its checkpoints' or a checkpoint.

    Raises InputError where no whole checkpoint is, and ConfigError for one that `trimtab train` did not write or that
    has options which are none here, and for an option of FIXED with another value.
    """
    asked = Path(given["resume"])
    try:
        folder = _by_name(on_disk.resolve(asked / CHECKPOINTS if (asked / CHECKPOINTS).is_dir() else asked))
    except InputError as error:
        left = unnamed_model(asked)
        raise InputError(f"{error}; {left}" if left else str(error)) from None
    saved = _run_of(folder)["config"]
    kept = {field.name: field.default for field in OPTIONS if not field.metadata["per_run"]}
    if unknown := sorted(saved.keys() - {field.name for field in OPTIONS} - {"debug"}):
        raise ConfigError(
            f"{folder}: its run has options that this trimtab lacks: {', '.join(unknown)}; go on with the trimtab that "
            "wrote it"
        )
    saved = kept | {name: value for name, value in saved.items() if name in kept}
    for name in FIXED:
        if name in given and _absolute(name, given[name]) != saved[name]:
            hint = "; --stop-after ends a run early" if name == "max_steps" else ""
            if name == "model" and not {given[name], saved[name]} & PRESETS.keys():
                if (other := _differing_file(Path(given[name]), folder)) is None:
                    continue
                hint = f": {other} is not what the checkpoint holds"
            raise ConfigError(
                f"{flag_of(name)} {given[name]}: the run of {folder} has {saved[name]}, and going on cannot "
                f"change it{hint}"
            )
    if "out" not in given and folder.parent.name != CHECKPOINTS:
        raise ConfigError(f"--resume {asked}: {folder} lies in no run's folder; say with --out where to write")
    return TrainConfig.of({**saved, "out": str(folder.parent.parent), **given, "resume": str(folder)})


def check_resume(config: TrainConfig, ranks: int, groups: Sequence[Group]) -> None:
    """Hold the run against its checkpoint: data, ranks that read different data, steps and metrics."""
    folder = Path(config.resume or "")
    run, step = _run_of(folder), on_disk.step_of(folder)
    if ranks != run["data_ranks"]:
        raise ConfigError(
            f"--resume {folder}: {run['data_ranks']} rank(s) read different data then, {ranks} would now, and batches "
            "would not be the same; give the --nproc of then, or change --tp, --fsdp or --replicate"
        )
    now = describe_data(groups)
    if now != run["data"] and not config.accept_new_data:
        asked = " ".join(config.data) or "(the standard library)"
        raise ConfigError(
            f"--data {asked}: not the data of {folder}: {now['files']} file(s) of {now['bytes']} bytes now, "
            f"{run['data']['files']} of {run['data']['bytes']} then, or other names or weights; --accept-new-data goes "
            "on with it, as many blocks into its order as were read"
        )
    if config.frozen and run.get("weights") != describe_weights(config.model):
        raise ConfigError(f"--model {config.model}: its files of weights are not those that {folder} was trained over")
    steps = config.max_steps or step + 1
    last = min(config.stop_after or steps, steps)
    if step >= last and not step == last == steps:  # all taken: what is left is to write the model
        raise ConfigError(f"--resume {folder}: step {step} is taken already, and the run would end after step {last}")
    read_metrics_until(folder, step)


def describe_data(groups: Sequence[Group]) -> dict[str, Any]:
    """Number and size of the data's files, and a hash of names, sizes and weights in order; contents are not read."""
    files = [(path, path.stat().st_size, group.weight) for group in groups for path in group.files]
    lines = os.fsencode("".join(f"{path.name} {size} {weight}\n" for path, size, weight in files))
    return {"files": len(files), "bytes": sum(size for _, size, _ in files), "names": hashlib.sha256(lines).hexdigest()}


def describe_weights(model: str) -> str:
    """A hash of the names and sizes of a model's files of weights; of a preset's name."""
    sizes = [f"{path.name} {path.stat().st_size}" for path in sorted(Path(model).glob("*.safetensors"))]
    return hashlib.sha256("\n".join(sizes or [model]).encode()).hexdigest()


def describe_run(config: TrainConfig, ranks: int, groups: Sequence[Group]) -> dict[str, Any]:
    """The part of a checkpoint that `resumed` and `check_resume` read, JSON."""
    fields = config.made_of()
    fields["data"] = [str(Path(path).resolve()) for path in config.data]
    fields["model"] = _absolute("model", config.model)
    made = {"config": fields, "data_ranks": ranks, "data": describe_data(groups)}
    return made | {"weights": describe_weights(config.model)} if config.frozen else made


def read_metrics_until(folder: Path, step: int) -> list[str]:
    """The lines of the metrics of the run that wrote the checkpoint, up to its step; none where no such file is. Raises
    InputError where the record of that step, or of one before it, cannot be read."""
    path = folder.parent.parent / METRICS
    if folder.parent.name != CHECKPOINTS or not path.exists():
        return []
    lines, last = [], 0
    with path.open(encoding="utf-8", errors="replace") as written:
        for line in written:
            try:
                number = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):  # half a line, of a run that was killed
                break
            if not isinstance(number, int) or number > step:
                break
            lines.append(line)
            last = number
    if last != step:
        raise InputError(
            f"{path}: ends with step {last} or is damaged there; the checkpoint {folder} is of step {step}"
        )
    return lines


def rewind(folder: Path, step: int, out: Path) -> None:
    """Take back what came after the checkpoint: later checkpoints and those of another run, later lines of metrics,
    pictures and models. The plan of a run refuses before where nobody asked for that."""
    fresh = out / f"{METRICS}{on_disk.UNFINISHED}"
    fresh.write_text("".join(read_metrics_until(folder, step)), encoding="utf-8")
    on_disk.sync(fresh)
    for later in reversed(on_disk.whole_checkpoints(out / CHECKPOINTS)):
        if on_disk.step_of(later) > step or later.parent.resolve() != folder.parent.resolve():
            on_disk.remove(later)
    for half in on_disk.unfinished_checkpoints(out / CHECKPOINTS):
        if on_disk.step_of(half) > step:
            on_disk.clear(half)
    fresh.rename(out / METRICS)
    remove_results(out)


def remove_results(out: Path) -> None:
    """Remove the picture and the models of a run, whole or not."""
    (out / HEATMAP).unlink(missing_ok=True)
    for name in (FINAL, MERGED):
        on_disk.clear(out / name)
        on_disk.clear(out / f"{name}{on_disk.UNFINISHED}")


def advice(out: Path, nproc: int | None) -> str | None:
    """Words on going on with the run that writes to `out`; None if it is finished or has left nothing to go on with."""
    held = on_disk.latest(out / CHECKPOINTS)
    if held is None or (out / FINAL).exists():
        return None if (out / FINAL).exists() else unnamed_model(out)
    return f"go on from step {on_disk.step_of(held)} with: {resume_command(out, nproc)}"


class Checkpoints:
    """The checkpoints of one run, which `describe_run` tells from others. Every rank must call `restore`,
    `restore_model` and `after_step`.

    base: the folder of the model that the run began with; its configuration and tokenizer go into each checkpoint.
    start: the step that the run goes on from, 0 for a new one. needs: as `Autosave` takes it.
    """

    def __init__(self, config: TrainConfig, run: dict[str, Any], base: Path, needs: int) -> None:
        self.out, self.root = Path(config.out), Path(config.out) / CHECKPOINTS
        self.config, self._run = config, run
        self.resume = None if config.resume is None else Path(config.resume)
        self.start = 0 if self.resume is None else on_disk.step_of(self.resume)
        self.autosave = Autosave(config.save_every, self.root, needs)
        self._last = math.inf if config.stop_after is None else config.stop_after
        files = (base / on_disk.CONFIG, *on_disk.carried_files(base))
        self._files = {path.name: path.read_bytes() for path in files}
        self._loaded: Loaded | None = None

    def restore(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Load the checkpoint to go on from, if there is one, and take back what came after it."""
        if self.resume is None:
            return
        loaded = self._loaded = self.restore_model(model, _inner(optimizer))
        groups = _inner(optimizer).param_groups  # how many there are depends on the ranks
        rates = {"base_lrs": [g["initial_lr"] for g in groups], "_last_lr": [g["lr"] for g in groups]}
        scheduler.__dict__.update(loaded.index.extra["scheduler"], **rates)

    def restore_model(self, model: Any, optimizer: Any = None) -> Loaded:
        """Load the checkpoint to go on from; without an optimizer the model alone, of a run that took all its steps."""
        from trimtab.checkpoint.ranks import on_first_rank
        from trimtab.checkpoint.save_load import load

        assert self.resume is not None
        loaded = load(self.resume, self._held(model), optimizer)
        on_first_rank(lambda: rewind(loaded.folder, self.start, self.out), None)
        return loaded

    def first_batch_drawn(self) -> None:
        """Restore the random numbers: making a DataLoader's iterator has drawn some."""
        if self._loaded is not None:
            self._loaded.restore_random()
            self._loaded = None

    def is_due(self, step: int) -> bool:
        """True where a checkpoint is asked for after this step."""
        every = self.config.save_every
        return bool(every and step % every == 0) or step >= self._last

    def after_step(self, step: int, model: Any, optimizer: Any, scheduler: Any) -> bool:
        """Save where a checkpoint is due; one that nobody asked for fails in words alone. Returns True where the run is
        to stop here."""
        from trimtab.checkpoint.ranks import on_first_rank

        began, due = time.monotonic(), self.autosave.due and step != self.config.max_steps
        if self.is_due(step):
            self._save(step, model, optimizer, scheduler, {})
        elif due and on_first_rank(lambda: self.autosave.has_room(step), None):
            try:
                self._save(step, model, optimizer, scheduler, {MARK: True})
            except TrimtabError as error:  # the same on every rank
                on_first_rank(partial(self.autosave.give_up, step, str(error)), None)
        if due or self.is_due(step):
            self.autosave.saved(began)
        return self.autosave.stop or step >= self._last

    def _save(self, step: int, model: Any, optimizer: Any, scheduler: Any, mark: dict[str, bool]) -> None:
        from trimtab.checkpoint.ranks import on_first_rank
        from trimtab.checkpoint.save_load import save

        on_first_rank(lambda: on_disk.sync(self.out / METRICS), None)
        extra = {"run": self._run, "scheduler": {key: getattr(scheduler, key) for key in _COUNTS}, **mark}
        save(self.root, self._held(model), _inner(optimizer), step=step, extra=extra, files=self._files)
        on_first_rank(lambda: remove_old(self.out, self.config.keep), None)

    def _held(self, model: Any) -> Any:
        """The part of the model that its checkpoints hold."""
        from trimtab.train.models import trained_part

        return trained_part(model) if self.config.frozen else model


def remove_old(out: Path, keep: int | None) -> None:
    """Remove a run's checkpoints but the latest `keep` and the one of the lowest loss in evaluation; without `keep`
    those that nobody asked for, but the latest."""
    held = on_disk.whole_checkpoints(out / CHECKPOINTS)
    if keep is None:
        remove_unasked(out / CHECKPOINTS, on_disk.step_of(held[-1]))
        return
    best = best_step(out / METRICS, held)
    for old in held[:-keep]:
        if on_disk.step_of(old) != best:
            on_disk.remove(old)


def _inner(optimizer: Any) -> Any:
    """The optimizer in Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _by_name(folder: Path) -> Path:
    """A checkpoint by the name that it was asked for by, if that lies in a run's folder; else where its links lead."""
    named = Path(os.path.abspath(folder))
    return named if named.parent.name == CHECKPOINTS and on_disk.is_step(named) else folder.resolve()


def _run_of(folder: Path) -> dict[str, Any]:
    run = on_disk.read_index(folder).extra.get("run")
    if not isinstance(run, dict):
        raise ConfigError(f"{folder}: was not written by trimtab train; load it with trimtab.checkpoint.load")
    return run


def _differing_file(model: Path, folder: Path) -> str | None:
    """The first file describing a model that is not the same in `model` and in the checkpoint; None if all are."""
    names = [path.name for where in (folder, model) for path in (where / on_disk.CONFIG, *on_disk.carried_files(where))]
    for name in names:
        here, there = (file.read_bytes() if file.is_file() else None for file in (model / name, folder / name))
        if here != there:
            return name
    return None


def _absolute(name: str, value: Any) -> Any:
    return str(Path(value).resolve()) if name == "model" and value not in PRESETS else value
