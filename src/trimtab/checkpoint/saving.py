"""Saving: into a folder with another name, synced, and named a checkpoint only when every rank is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint.agree import on_every_rank, on_first_rank
from trimtab.checkpoint.rank_state import check_readable, rank_state
from trimtab.checkpoint.state import Groups, expert_shapes, model_tensors, optimizer_state, unwrapped
from trimtab.checkpoint.tensors import check_given, files_of, make_index, write_dcp, write_files
from trimtab.errors import InputError, full_disk
from trimtab.validation import check_sizes


def save(
    root: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: dict[str, Any] | None = None,
    rank_extra: Any = None,
    files: Mapping[str, str | bytes] | None = None,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write ROOT/step-<step>; see `trimtab.checkpoint.folder` for what is in it. Every rank of the group must call.

    Call it between optimizer steps: gradients and `main_grad` are not saved. Experts are saved as [E, …] whatever
    ranks they lie on, and load at any other layout. Generators other than the default ones and the routers' are not
    known here: put their states into `rank_extra`.

    Args:
        root: one folder for all ranks, on whatever hosts they are.
        model: plain, or under `parallelize`, `fully_shard_moe`, `ddp`, transformers' own sharding or torch.compile;
            the same modules on every rank.
        step: optimizer steps taken.
        extra: JSON, the same on all ranks; the first rank's is kept.
        rank_extra: of this rank: tensors, numbers, strings and containers of them; nothing of NumPy.
        files: small files to put beside it, by plain name. Without it, config.json of a transformers model.
        keep: so many whole checkpoints are kept, this one among them; older ones are removed. All if not given.
        group: the ranks that hold the model; all if not given.

    Returns the folder, on every rank.

    Raises, on every rank:
        ConfigError: there is a checkpoint of this step, `root` cannot be written, or `step` or `keep` is no number of
            steps or checkpoints.
        InputError: what cannot be saved or read again, of the state or the arguments; ranks that hand in another
            `root`, `step`, `keep` or optimizer; or a rank that could not write, or wrote to another folder of that
            name.
    """
    root = Path(root)
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    if files is None:
        files = _config_file(model)
    tensors: dict[str, Tensor] = {}
    groups: list[Groups] = []

    def collect() -> dict[str, object]:
        check_given(step, extra, files)
        if keep is not None:
            check_sizes(keep=keep)
        if rank_extra is not None:
            check_readable(rank_extra)
        tensors.update(model_tensors(model))
        if optimizer is not None:
            state, own = optimizer_state(model, optimizer)
            tensors.update(state)
            groups.append(own)
        kind = "none" if optimizer is None else type(optimizer).__name__
        return {"root": str(root), "step": step, "keep": keep, "optimizer": kind}

    _check_same(on_every_rank(collect, group))
    unfinished = on_first_rank(lambda: on_disk.begin(root, step), group)
    write_dcp(unfinished, tensors, group)

    def write_own() -> None:
        path = unfinished / on_disk.rank_file(rank)
        state = rank_state(model, rank_extra)
        try:
            torch.save(state, path)
        except RuntimeError as error:
            raise InputError(f"{path}: {error}{full_disk(root)}") from error
        on_disk.sync(path)

    ranks = len(on_every_rank(write_own, group))  # and so all have written

    def end() -> Path:
        _check_gathered(unfinished, ranks)
        write_files(unfinished, files)
        index = make_index(
            step=step, world=ranks, experts=expert_shapes(model), optimizer=next(iter(groups), None), extra=extra or {}
        )
        on_disk.write_index(unfinished, index)
        folder = on_disk.finish(unfinished)
        others = [path for path in on_disk.whole_checkpoints(root) if path != folder]
        for old in others[: max(0, len(others) + 1 - keep)] if keep else ():
            on_disk.remove(old)
        return folder

    return on_first_rank(end, group)


def _check_same(given: list[dict[str, object]]) -> None:
    """Raise InputError, on every rank, where the ranks hand in different values."""
    for name, first in given[0].items():
        if any(one[name] != first for one in given):
            said = ", ".join(f"rank {rank}: {one[name]}" for rank, one in enumerate(given))
            raise InputError(f"save: {name} is not the same on all ranks ({said}); hand in one and the same")


def _check_gathered(unfinished: Path, ranks: int) -> None:
    """Raise InputError where a rank's files are not there: its host has another folder of that name."""
    names = {on_disk.rank_file(rank): rank for rank in range(ranks)}
    names |= {name: int(name.removeprefix("__").split("_")[0]) for name in files_of(unfinished)}
    missing = {name: rank for name, rank in names.items() if not (unfinished / name).is_file()}
    if missing:
        away = ", ".join(map(str, sorted(set(missing.values()))))
        raise InputError(
            f"{unfinished}: rank(s) {away} wrote elsewhere: {min(missing)} is not there; save to a folder that all "
            "hosts share"
        )


def _config_file(model: nn.Module) -> dict[str, str | bytes]:
    """config.json of a transformers model, without what is about this run's ranks."""
    config = getattr(unwrapped(model), "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    assert config is not None
    fields = json.loads(config.to_json_string(use_diff=False))
    fields.pop("distributed_config", None)
    return {on_disk.CONFIG: json.dumps(fields, indent=2, sort_keys=True) + "\n"}
