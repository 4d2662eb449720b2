"""One rank from start to end: join the others, load, train, save, report."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from trimtab.checkpoint.folder import UNFINISHED
from trimtab.checkpoint.ranks import on_every_rank, on_first_rank
from trimtab.convert.files import writing
from trimtab.convert.merge import CONFIG, TENSORS
from trimtab.errors import InputError
from trimtab.integrations.transformers.summary import summary
from trimtab.processes import Interrupted, leave_group
from trimtab.routing.loads import draw_loads
from trimtab.train.autosave import first_signal_noted, remove_unasked
from trimtab.train.loading import finished, load_model
from trimtab.train.loop import MoETrainer
from trimtab.train.models import packed, whole_model
from trimtab.train.out_folder import make_room
from trimtab.train.plan import Plan
from trimtab.train.presets import PRESETS
from trimtab.train.report import CHECKPOINTS, FINAL, HEATMAP, MERGED, METRICS, closing_words, resume_command
from trimtab.train.resume import advice
from trimtab.train.weights import open_source, write_merged, write_model

LONGEST = timedelta(hours=2)
"""Time that ranks wait for one that saves or reads the data: the groups' own limits are 10 and 30 minutes."""


def run_session(plan: Plan, *, prepared: bool) -> None:
    """Train as this process's rank (the only one, where the environment names none) and save.

    prepared: True where a launcher on this machine has made the output folder. Raises Interrupted, on every rank, where
    any has got a signal and the run has ended after that step, saved; a second signal ends this process as it would
    without.
    """
    if not plan.config.debug:
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # DTensor's advice on gathering to save
    rank, world = int(os.environ.get("RANK", 0)), plan.mesh.world
    began = time.perf_counter()
    if world > 1:
        _join_world()
    with contextlib.ExitStack() as held:  # the output folder, until the last word on it is said
        try:
            if not prepared:
                if rank == 0:
                    held.enter_context(make_room(plan))
                if world > 1:
                    dist.barrier()
            plan = plan.with_steps()
            trainer = _build(plan, rank)
            autosave, steps, missing = trainer.checkpoints.autosave, plan.config.max_steps or 0, None
            with first_signal_noted(autosave.signals, lambda _: _say_stopping(rank)):
                done = _take_steps(trainer, plan)
                if done == steps:
                    if rank == 0:  # first: with its model the run is finished
                        missing = draw_loads(plan.out / METRICS, plan.out / HEATMAP)
                    _save(trainer.model, plan, rank)
                    if rank == 0 and plan.config.keep is None:
                        remove_unasked(plan.out / CHECKPOINTS, math.inf)
        finally:
            if dist.is_initialized():
                leave_group()
        if autosave.stop and done != steps:
            raise Interrupted(autosave.signals[0] if autosave.signals else signal.SIGTERM)
        if rank == 0 and done != steps:
            command = resume_command(plan.out, world)
            print(f"stopped after step {done} of {steps}; go on with: {command}", flush=True)
        elif rank == 0:
            unit = "byte" if plan.config.model in PRESETS else "token"
            seconds = time.perf_counter() - began
            print(*closing_words(plan.out, unit, seconds, missing), sep="\n", flush=True)


def _say_stopping(rank: int) -> None:
    """From a signal handler, where `print` may be in the middle of its own work."""
    if rank == 0:
        with contextlib.suppress(OSError):
            os.write(2, b"\ntrimtab: the run ends once this step is done and saved; a second signal ends it at once\n")


def _join_world() -> None:
    """Initialize the default process group for the accelerator of this machine, or for CPUs."""
    from transformers.distributed.utils import get_distributed_backend

    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.accelerator.current_accelerator() or device
        device = torch.device(device.type, torch.accelerator.current_device_index())
    backend = get_distributed_backend(device.type)
    dist.init_process_group(backend=backend, device_id=device if backend == "nccl" else None, timeout=LONGEST)


def _build(plan: Plan, rank: int) -> MoETrainer:
    if rank == 0 and sys.stderr.isatty():
        transformers_logging.enable_progress_bar()
    model = load_model(plan.checkpoint, packed(plan.config, plan.skeleton, plan.mesh), plan.mesh)
    transformers_logging.disable_progress_bar()
    model = finished(model, plan.config)
    if rank == 0:
        print(summary(model), flush=True)
    return MoETrainer(plan, model, rank)


def _take_steps(trainer: MoETrainer, plan: Plan) -> int:
    """Train; returns how many steps are taken. A run that had taken them all and did not write its model is loaded."""
    start = trainer.checkpoints.start
    with contextlib.closing(trainer.bar):
        if start == plan.config.max_steps:
            trainer.checkpoints.restore_model(trainer.model)
            return start
        trainer.train()
    return int(trainer.state.global_step)


def _save(model: Any, plan: Plan, rank: int) -> None:
    """Write `final/`: the checkpoint that the run began with, its weights trained; or the adapters, and before them
    `merged/`, where that is asked for. Every rank must call; all raise what fails on the one that writes."""
    config, skeleton, first = plan.config, plan.skeleton, rank == 0
    unfinished, half = (plan.out / f"{name}{UNFINISHED}" for name in (FINAL, MERGED))
    source = plan.source  # opened as the run began, whatever has become of its folder
    if source is None or source.folder != plan.checkpoint:
        source = open_source(plan.checkpoint, skeleton, config.drop)

    def write() -> None:
        try:
            with writing(unfinished):
                if not config.frozen:
                    write_model(model, source, unfinished, dtype=config.save_dtype, write=first)
                elif first:
                    write_adapter(model, unfinished, base=str(plan.checkpoint.resolve()), dtype=config.save_dtype)
                    if config.merge:
                        print(write_merged(unfinished, skeleton, source, half, dtype=config.save_dtype), flush=True)
                        half.rename(plan.out / MERGED)
                    if named := name_for_whole_model(unfinished, skeleton, plan.checkpoint):
                        print(f"adapter names are those of {named}, the whole model", flush=True)
                if first:
                    unfinished.rename(plan.out / FINAL)
        except InputError as error:
            left = advice(plan.out, plan.mesh.world)
            raise InputError(f"{error}; {left}" if left else str(error)) from error

    if not config.frozen:
        with writing(unfinished):
            on_first_rank(unfinished.mkdir, None)
    on_every_rank(write, None)


def write_adapter(model: Any, folder: Path, *, base: str, dtype: str | None) -> None:
    """Write peft's folder of the model's adapters, which every rank has whole; one rank calls. base: where the model
    below lies, as the folder says. dtype: of the adapters; that of training if not given."""
    (made,) = model.peft_config.values()
    made.base_model_name_or_path = base
    wanted = None if dtype is None else getattr(torch, dtype)
    state = {name: p.detach().to(dtype=wanted) for name, p in model.named_parameters() if p.requires_grad}
    model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)


def name_for_whole_model(folder: Path, skeleton: Any, base: Path) -> str | None:
    """Give the adapter in peft's `folder` the names of the whole model. Returns that model's class, None where the
    skeleton is all of it."""
    if (whole := whole_model(skeleton, base)) is None:
        return None
    inner = f"{skeleton.base_model_prefix}."

    def named(name: str, before: str = "") -> str:
        own = name.removeprefix(before)
        return f"{before}{whole[1]}.{own.removeprefix(inner)}" if own.startswith(inner) else name

    tensors = load_file(folder / TENSORS)
    moved = {named(key, "base_model.model."): tensor for key, tensor in tensors.items()}
    save_file(moved, folder / TENSORS, metadata={"format": "pt"})
    fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for key, there in (
        ("target_modules", skeleton.named_modules()), ("target_parameters", skeleton.named_parameters()),
    ):  # fmt: skip
        ends = tuple(f".{end}" for end in fields.get(key) or ())
        fields[key] = [named(own) for own, _ in there if f".{own}".endswith(ends)]
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return whole[0]
