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
from trimtab.train.sources import check_documents, find_files


def check_options(config: TrainConfig, world: int) -> None:
    """Check ranks, model folder, output folder and the data's beginning. Raises ConfigError or InputError."""
    Mesh.of(config, world=world)
    full = config.resolved(preset=config.model in PRESETS)
    if config.resume is None and full.warmup and full.warmup >= (full.max_steps or 0):
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
    check_documents(find_files(config.data).files, config.seed)


def check_kept(config: TrainConfig) -> None:
    """No model and no checkpoint is removed, and none of another run joined by ours, that nobody asked to remove."""
    if config.overwrite:
        return
    out, resume = Path(config.out), None if config.resume is None else Path(config.resume)
    held, finished = latest(out / CHECKPOINTS), (out / FINAL).exists()
    if held is not None and (resume is None or resume.parent.resolve() != held.parent.resolve()):
        go_on, model = ("", " and the model") if finished else (f"go on with it by --resume {out}, ", "")
        raise ConfigError(
            f"--out {out}: holds checkpoints of a {'finished ' if finished else ''}run, up to {held.name}; {go_on}give "
            f"a new folder, or have --overwrite remove them{model}"
        )
    if held is not None and resume is not None and step_of(held) > step_of(resume):
        go_on = "" if finished else f"go on from that by --resume {out}, "
        raise ConfigError(
            f"--resume {resume}: there are later checkpoints, up to {held.name}; {go_on}"
            f"write to a new folder with --out, or have --overwrite remove what came after step {step_of(resume)}"
        )
    begun = 0 if resume is None else step_of(resume)
    for half in unfinished_checkpoints(out / CHECKPOINTS):
        if not half.name.endswith(UNFINISHED) and step_of(half) > begun:
            raise ConfigError(
                f"--out {out}: {half} is not whole, half of a copy perhaps, and in the way of a checkpoint of that "
                "step; copy it again, or have --overwrite remove it"
            )
    if finished:
        raise ConfigError(
            f"--out {out}: holds the model of a finished run, {out / FINAL}; give a new folder, or have --overwrite "
            "remove it"
        )


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
