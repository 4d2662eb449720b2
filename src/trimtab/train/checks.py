"""What can be refused within a blink: before torch is imported, and long before a rank starts."""

from __future__ import annotations

import os
from pathlib import Path

from trimtab.checkpoint.folder import UNFINISHED, latest, step_of, unfinished_checkpoints
from trimtab.errors import ConfigError
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.presets import PRESETS
from trimtab.train.report import FINAL, RUN
from trimtab.train.resume import CHECKPOINTS, check_resume
from trimtab.train.sources import find_groups


def check_options(config: TrainConfig, world: int) -> None:
    """Check ranks, model folder, output folder and that there is data. Raises ConfigError or InputError."""
    Mesh.of(config, world=world)
    if config.epochs is not None and config.max_steps is not None:
        raise ConfigError("--epochs and --max-steps: give one of them")
    full = config.resolved(preset=config.model in PRESETS)
    if config.resume is None and config.epochs is None and full.warmup and full.warmup >= (full.max_steps or 0):
        raise ConfigError(
            f"--warmup {full.warmup}: the learning rate would not reach its peak within {full.max_steps} step(s); "
            "lower --warmup, or raise --max-steps"
        )
    if config.model not in PRESETS and not (Path(config.model) / "config.json").is_file():
        what = "no config.json in that folder" if Path(config.model).is_dir() else "no such folder"
        raise ConfigError(f"--model {config.model}: {what}; give a checkpoint folder or one of {', '.join(PRESETS)}")
    _check_out(Path(config.out), config.model)
    check_kept(config)
    if config.resume is not None:
        check_resume(config, world)
    find_groups(config.data)


def check_kept(config: TrainConfig) -> None:
    """No model and no checkpoint is removed, and none of another run joined by ours, that nobody asked to remove."""
    if config.overwrite:
        return
    out, resume = Path(config.out), None if config.resume is None else Path(config.resume)
    held, finished = latest(out / CHECKPOINTS), (out / FINAL).exists()
    begun = 0 if resume is None else step_of(resume)
    ours = resume is not None and held is not None and resume.parent.resolve() == held.parent.resolve()
    half = [path for path in unfinished_checkpoints(out / CHECKPOINTS) if not path.name.endswith(UNFINISHED)]
    if held is not None and not (ours and step_of(held) <= begun):
        what = f"{'later ' if ours else ''}checkpoints of a {'finished ' if finished else ''}run, up to {held.name}"
        remedy = "" if finished else f"go on from there by --resume {out}, "
    elif late := [path.name for path in half if step_of(path) > begun]:
        what, remedy = f"{late[0]}, which is not whole, half of a copy perhaps", "copy it again, "
    elif finished:
        what, remedy = f"the model of a finished run, {out / FINAL}", ""
    else:
        return
    raise ConfigError(f"--out {out}: holds {what}; {remedy}give a new folder, or have --overwrite remove it")


def _check_out(out: Path, model: str) -> None:
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"--out {out}: {existing} is not a folder")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"--out {out}: no permission to write in {existing}")
    if out.is_dir() and any(out.iterdir()) and not (out / RUN).exists():
        raise ConfigError(f"--out {out}: the folder is in use and holds no trimtab run; give a new one")
    if model not in PRESETS and out.resolve() in Path(model).resolve().parents:
        raise ConfigError(f"--out {out}: the model {model} lies in it and would be overwritten; give a new one")
