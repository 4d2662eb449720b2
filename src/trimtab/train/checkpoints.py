"""When a run saves, what goes into its checkpoints beside model and optimiser, and how it comes back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import CONFIG, carried_files, remove, step_of, whole_checkpoints
from trimtab.checkpoint.ranks import on_first_rank
from trimtab.checkpoint.save_load import Loaded, load, save
from trimtab.train.adapters import trained_part
from trimtab.train.prepare import Plan
from trimtab.train.report import METRICS, best_step
from trimtab.train.resume import CHECKPOINTS, describe_run, rewind

_COUNTS = ("last_epoch", "_step_count")
"""What a schedule holds beside the groups' rates, which the optimiser's state has."""


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        start: the step that the run goes on from, 0 for a new one.
    """

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        self.root, self.out = plan.out / CHECKPOINTS, plan.out
        self.every, self.stop_after, self.keep = config.save_every, config.stop_after, config.keep
        self.resume = None if config.resume is None else Path(config.resume)
        self._adapters = config.lora is not None
        self.start = 0 if self.resume is None else step_of(self.resume)
        self._run = describe_run(config, plan.mesh, plan.groups)
        base = Path(plan.checkpoint)
        self._files = {path.name: path.read_bytes() for path in (base / CONFIG, *carried_files(base))}
        self._loaded: Loaded | None = None

    def restore(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Load the checkpoint to go on from, if there is one, and take back what came after it."""
        if self.resume is None:
            return
        loaded = self._loaded = load(self.resume, self._held(model), inner(optimizer))
        groups = inner(optimizer).param_groups  # how many there are depends on the ranks
        rates = {"base_lrs": [g["initial_lr"] for g in groups], "_last_lr": [g["lr"] for g in groups]}
        scheduler.__dict__.update(loaded.index.extra["scheduler"], **rates)
        on_first_rank(lambda: rewind(loaded.folder, self.start, self.out), None)

    def restore_model(self, model: Any) -> None:
        """Load the model alone, of a run that has taken all its steps."""
        assert self.resume is not None
        loaded = load(self.resume, self._held(model))
        on_first_rank(lambda: rewind(loaded.folder, self.start, self.out), None)

    def first_batch_drawn(self) -> None:
        """Random numbers as they were: making a DataLoader's iterator has drawn some."""
        if self._loaded is not None:
            self._loaded.restore_random()
            self._loaded = None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return bool(self.every and step % self.every == 0) or self._is_last(step)

    def _is_last(self, step: int) -> bool:
        return self.stop_after is not None and step >= self.stop_after

    def after_step(self, step: int, model: Any, optimizer: Any, scheduler: Any) -> bool:
        """Save where a checkpoint is due. Returns whether the run is to stop here. Every rank must call."""
        if self.is_due(step):
            on_first_rank(self._sync_metrics, None)
            save(
                self.root,
                self._held(model),
                inner(optimizer),
                step=step,
                extra={"run": self._run, "scheduler": {key: getattr(scheduler, key) for key in _COUNTS}},
                files=self._files,
            )
            if self.keep:
                on_first_rank(self._remove_old, None)
        return self._is_last(step)

    def _held(self, model: Any) -> Any:
        """What of the model its checkpoints hold."""
        return trained_part(model) if self._adapters else model

    def _remove_old(self) -> None:
        """Keep the latest ones and the one of the lowest loss in evaluation."""
        held = whole_checkpoints(self.root)
        best = best_step(self.out / METRICS, held)
        for old in held[: -(self.keep or 0)]:
            if step_of(old) != best:
                remove(old)

    def _sync_metrics(self) -> None:
        with (self.out / METRICS).open("rb") as file:
            os.fsync(file.fileno())


def inner(optimizer: Any) -> Any:
    """The optimiser in Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
