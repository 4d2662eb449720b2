"""One rank from start to end: join the others, load, train, save, report."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from trimtab.convert.safetensors_files import writing
from trimtab.integrations.transformers.summary import summary
from trimtab.processes import leave_group
from trimtab.routing.load_picture import draw_loads
from trimtab.train.adapters import adapted, write_adapter
from trimtab.train.blocks import RankBlocks
from trimtab.train.checkpoints import Checkpoints
from trimtab.train.config import TrainConfig
from trimtab.train.loop import MoETrainer
from trimtab.train.models import check_finite, is_preset, load_model, mask_by_positions
from trimtab.train.prepare import Plan, make_room, plan_run, with_steps
from trimtab.train.report import FINAL, HEATMAP, MERGED, METRICS, closing_words, stopping_words
from trimtab.train.weights import open_source, write_merged, write_model

LONGEST = timedelta(hours=2)
"""That ranks wait for one that saves or reads the data: the groups' own limits are 10 and 30 minutes."""


def run_session(config: TrainConfig, *, prepared: bool) -> None:
    """Train as this process's rank (the only one, where the environment names none) and save.

    `prepared` says that a launcher on this machine has checked the data and made the output folder.
    """
    transformers_logging.disable_progress_bar()
    if not config.debug:
        transformers_logging.set_verbosity_error()
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # DTensor's advice on gathering to save
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    began = time.perf_counter()
    plan = plan_run(config, world)
    if world > 1:
        _join_world()
    with contextlib.ExitStack() as held:  # the output folder, until the last word on it is said
        try:
            if not prepared:
                if rank == 0:
                    held.enter_context(make_room(plan))
                _barrier()
            plan = with_steps(plan)
            trainer = _build(plan, rank)
            done = _take_steps(trainer, plan)
            missing = None
            if done == plan.config.max_steps:
                if rank == 0:  # first: with its model the run is finished
                    missing = draw_loads(plan.out / METRICS, plan.out / HEATMAP)
                _save(trainer.model, plan, rank)
        finally:
            if dist.is_initialized():
                leave_group()
        if rank == 0 and done != plan.config.max_steps:
            print(stopping_words(plan.out, step=done, steps=plan.config.max_steps or 0, ranks=world), flush=True)
        elif rank == 0:
            unit = "byte" if is_preset(config.model) else "token"
            seconds = time.perf_counter() - began
            print(closing_words(plan.out, unit=unit, seconds=seconds, missing_picture=missing), flush=True)


def _join_world() -> None:
    """Initialise the default process group for the accelerator of this machine, or for CPUs."""
    from transformers.distributed.utils import get_distributed_backend

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator else "cpu"
    device = None
    if accelerator:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.device(kind, torch.accelerator.current_device_index())
    backend = get_distributed_backend(kind)
    dist.init_process_group(backend=backend, device_id=device if backend == "nccl" else None, timeout=LONGEST)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _build(plan: Plan, rank: int) -> MoETrainer:
    config, mesh = plan.config, plan.mesh
    if rank == 0:
        transformers_logging.enable_progress_bar()
    model = load_model(plan.checkpoint, config, mesh)
    transformers_logging.disable_progress_bar()
    check_finite(model, config.model)
    mask_by_positions(model)
    checkpoints = Checkpoints(plan)
    if config.lora:
        model = adapted(model, config)
    if rank == 0:
        print(summary(model), flush=True)
    blocks = RankBlocks(
        plan.blocks(),
        batch=config.batch_size,
        rank=mesh.data_rank(rank),
        size=mesh.data_size,
        seed=config.seed,
        skip=checkpoints.start * config.grad_accum * config.batch_size,
    )
    return MoETrainer(model, config, mesh, blocks, plan.out / METRICS, checkpoints, plan.eval_blocks())


def _take_steps(trainer: MoETrainer, plan: Plan) -> int:
    """Train; returns how many steps are taken. A run that had taken them all and did not write its model is loaded."""
    start = trainer.checkpoints.start
    if start == plan.config.max_steps:
        trainer.checkpoints.restore_model(trainer.model)
        return start
    with contextlib.closing(trainer.bar):
        trainer.train()
    return int(trainer.state.global_step)


def _save(model: Any, plan: Plan, rank: int) -> None:
    """Write `final/`: the checkpoint that the run began with, its weights trained; or the adapters."""
    if plan.config.lora:
        if rank == 0:
            _save_adapters(model, plan)
        _barrier()
        return
    source = open_source(Path(plan.checkpoint), plan.facts.skeleton, plan.config.drop)
    unfinished = plan.out / f"{FINAL}.unfinished"
    with writing(unfinished):
        if rank == 0:
            unfinished.mkdir()
        write_model(model, source, unfinished, dtype=plan.config.save_dtype, write=rank == 0)
        if rank == 0:
            unfinished.rename(plan.out / FINAL)
    _barrier()


def _save_adapters(model: Any, plan: Plan) -> None:
    """Write `final/`, a folder of peft's, and before it is there `merged/`, where that is asked for."""
    config, base = plan.config, Path(plan.checkpoint)
    unfinished, merged = plan.out / f"{FINAL}.unfinished", plan.out / MERGED
    with writing(unfinished):
        write_adapter(model, unfinished, base=str(base.resolve()), dtype=config.save_dtype)
        if config.merge:
            half = plan.out / f"{MERGED}.unfinished"
            source = open_source(base, plan.facts.skeleton, config.drop)
            print(write_merged(unfinished, plan.facts.skeleton, source, half, dtype=config.save_dtype), flush=True)
            half.rename(merged)
        unfinished.rename(plan.out / FINAL)
