"""Going on from a checkpoint: what a run was made of comes from there, and what must not change is held against it.

The order of the data, the batches of a step and the schedule follow from FIXED options, the data's files and the
number of ranks that read different data. How those ranks share the model (ep, fsdp, tp, replicate) is free: then the
state is the same bit for bit, and the sums that follow may be rounded otherwise. The model that a run began with may
lie elsewhere now: its configuration and its tokenizer must be those that the checkpoint holds. Nothing here imports
torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.checkpoint import folder as on_disk
from trimtab.errors import ConfigError, InputError
from trimtab.train.config import FIXED, OPTIONS, Mesh, TrainConfig, flag_of
from trimtab.train.presets import PRESETS
from trimtab.train.report import FINAL, HEATMAP, MERGED, METRICS
from trimtab.train.sources import Group, find_groups

CHECKPOINTS = "checkpoints"


def resumed(given: dict[str, Any]) -> TrainConfig:
    """The configuration of a run that goes on: the checkpoint's, with those of `given` that may change.

    Args:
        given: options by name; `resume` is a run's folder, its checkpoints' or a checkpoint.

    Raises:
        InputError: no whole checkpoint there.
        ConfigError: one that `trimtab train` did not write, or that holds options which are none here; or an option of
            FIXED with another value.
    """
    asked = Path(given["resume"])
    folder = _by_name(on_disk.resolve(asked / CHECKPOINTS if (asked / CHECKPOINTS).is_dir() else asked))
    saved = _run_of(folder)["config"]
    kept = {field.name: field.default for field in OPTIONS if not field.metadata["per_run"]}
    if unknown := sorted(saved.keys() - {field.name for field in OPTIONS} - {"debug"}):
        raise ConfigError(
            f"{folder}: its run has options that this trimtab lacks: {', '.join(unknown)}; go on with the trimtab that "
            "wrote it"
        )
    saved = kept | {name: value for name, value in saved.items() if name in kept}
    for name in FIXED:
        if name in given and _plain(name, given[name]) != saved[name]:
            hint = "; --stop-after ends a run early" if name == "max_steps" else ""
            if name == "model" and not {given[name], saved[name]} & PRESETS.keys():
                if (other := _differing_file(Path(given[name]), folder)) is None:
                    continue
                hint = f": {other} is not what the checkpoint holds"
            raise ConfigError(
                f"{flag_of(name)} {given[name]}: the run of {folder} has {saved[name]}, and going on cannot "
                f"change it{hint}"
            )
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()} | given
    if "out" not in given:
        if folder.parent.name != CHECKPOINTS:
            raise ConfigError(f"--resume {asked}: {folder} lies in no run's folder; say with --out where to write")
        fields["out"] = str(folder.parent.parent)
    return TrainConfig(**{**fields, "resume": str(folder)})


def check_resume(config: TrainConfig, world: int) -> None:
    """Hold the run against its checkpoint: data, ranks, steps and metrics. Raises ConfigError or InputError."""
    folder = Path(config.resume or "")
    run, step = _run_of(folder), on_disk.read_index(folder).step
    ranks = Mesh.of(config, world=world).data_size
    if ranks != run["data_ranks"]:
        raise ConfigError(
            f"--resume {folder}: {run['data_ranks']} rank(s) read different data then, {ranks} would now, and batches "
            "would not be the same; give the --nproc of then, or change --tp, --fsdp or --replicate"
        )
    now = describe_data(find_groups(config.data))
    if now != run["data"] and not config.accept_new_data:
        asked = " ".join(config.data) or "(the standard library)"
        raise ConfigError(
            f"--data {asked}: not the data of {folder}: {now['files']} file(s) of {now['bytes']} bytes now, "
            f"{run['data']['files']} of {run['data']['bytes']} then, or other names or weights; --accept-new-data goes "
            "on with it, as many blocks into its order as were read"
        )
    if config.lora and run.get("weights") != describe_weights(config.model):
        raise ConfigError(f"--model {config.model}: its files of weights are not those that {folder} holds adapters of")
    steps = config.max_steps or step + 1
    last = min(config.stop_after or steps, steps)
    if step >= last and not step == last == steps:  # all taken: what is left is to write the model
        raise ConfigError(f"--resume {folder}: step {step} is taken already, and the run would end after step {last}")
    read_metrics_until(folder, step)


def describe_data(groups: Sequence[Group]) -> dict[str, Any]:
    """Number and size of the data's files, and a hash of names, sizes and weights in order; contents are not read."""
    files = [(path, path.stat().st_size, group.weight) for group in groups for path in group.files]
    lines = "".join(f"{path.name} {size} {weight}\n" for path, size, weight in files)
    names = os.fsencode(lines)  # of any bytes
    return {"files": len(files), "bytes": sum(size for _, size, _ in files), "names": hashlib.sha256(names).hexdigest()}


def describe_run(config: TrainConfig, mesh: Mesh, groups: Sequence[Group]) -> dict[str, Any]:
    """What a checkpoint keeps of its run, JSON, for `resumed` and `check_resume`."""
    fields = config.made_of()
    fields["data"] = [str(Path(path).resolve()) for path in config.data]
    fields["model"] = _plain("model", config.model)
    made = {"config": fields, "data_ranks": mesh.data_size, "data": describe_data(groups)}
    return made | {"weights": describe_weights(config.model)} if config.lora else made


def describe_weights(model: str) -> str:
    """A hash of the names and sizes of a model's files of weights; of a preset's name."""
    sizes = [f"{path.name} {path.stat().st_size}" for path in sorted(Path(model).glob("*.safetensors"))]
    return hashlib.sha256("\n".join(sizes or [model]).encode()).hexdigest()


def read_metrics_until(folder: Path, step: int) -> list[str]:
    """The lines of the metrics of the run that wrote the checkpoint, up to its step; none where no such file is.

    Raises InputError where the record of that step, or of one before it, cannot be read.
    """
    path = folder.parent.parent / METRICS
    if folder.parent.name != CHECKPOINTS or not path.exists():
        return []
    lines, last = [], 0
    with path.open(encoding="utf-8", errors="replace") as written:
        for line in written:
            number = _step_in(line)
            if number is None or number > step:  # of a run that was killed, or after the checkpoint
                break
            lines.append(line)
            last = number
    if last != step:
        raise InputError(
            f"{path}: ends with step {last} or is damaged there; the checkpoint {folder} is of step {step}"
        )
    return lines


def rewind(folder: Path, step: int, out: Path) -> None:
    """Take back what came after the checkpoint: later checkpoints, later lines of metrics, pictures and models.

    Checkpoints of another run go too. `trimtab.train.checks` refuses before where nobody asked for that.
    """
    fresh = out / f"{METRICS}.unfinished"
    fresh.write_text("".join(read_metrics_until(folder, step)), encoding="utf-8")
    on_disk.sync(fresh)
    for later in reversed(on_disk.whole_checkpoints(out / CHECKPOINTS)):
        if on_disk.step_of(later) > step or later.parent.resolve() != folder.parent.resolve():
            on_disk.remove(later)
    for half in on_disk.unfinished_checkpoints(out / CHECKPOINTS):
        if on_disk.step_of(half) > step:
            on_disk.clear(half)
    fresh.rename(out / METRICS)
    (out / HEATMAP).unlink(missing_ok=True)
    for name in (FINAL, f"{FINAL}.unfinished", MERGED, f"{MERGED}.unfinished"):
        on_disk.clear(out / name)


def advice(out: Path, nproc: int | None) -> str | None:
    """How to go on with the run that writes to `out`; None if it is finished or has no whole checkpoint."""
    held = on_disk.latest(out / CHECKPOINTS)
    if held is None or (out / FINAL).exists():
        return None
    ranks = f" --nproc {nproc}" if nproc and nproc > 1 else ""
    return f"go on from step {on_disk.step_of(held)} with: trimtab train --resume {shlex.quote(str(out))}{ranks}"


def _by_name(folder: Path) -> Path:
    """A checkpoint by the name that it was asked for by, if that lies in a run's folder; else where its links lead."""
    named = Path(os.path.abspath(folder))
    return named if named.parent.name == CHECKPOINTS and on_disk.is_step(named) else folder.resolve()


def _step_in(line: str) -> int | None:
    """The step that a line of metrics is of; None if it is no such line, or half of one."""
    try:
        number = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None


def _run_of(folder: Path) -> dict[str, Any]:
    run = on_disk.read_index(folder).extra.get("run")
    if not isinstance(run, dict):
        raise ConfigError(f"{folder}: was not written by trimtab train; load it with trimtab.checkpoint.load")
    return run


def _differing_file(model: Path, folder: Path) -> str | None:
    """The first of the files that describe a model which is not in `model` what it is in the checkpoint; None if all
    are equal."""
    names = [path.name for where in (folder, model) for path in (where / on_disk.CONFIG, *on_disk.carried_files(where))]
    for name in names:
        here, there = (file.read_bytes() if file.is_file() else None for file in (model / name, folder / name))
        if here != there:
            return name
    return None


def _plain(name: str, value: Any) -> Any:
    return str(Path(value).resolve()) if name == "model" and value not in PRESETS else value
