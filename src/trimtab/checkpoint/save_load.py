"""Saving: into a folder with another name, synced, and named a checkpoint only when every rank is done. Loading:
everything is checked against the checkpoint before anything is overwritten."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint import ranks as of_ranks
from trimtab.checkpoint import state as of_model
from trimtab.checkpoint import tensors as in_files
from trimtab.checkpoint.folder import MODEL, Index
from trimtab.errors import ConfigError, InputError, full_disk
from trimtab.routing.balance import routers
from trimtab.validation import check_sizes


def save(
    root: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, step: int,
    extra: dict[str, Any] | None = None, rank_extra: Any = None, files: Mapping[str, str | bytes] | None = None,
    keep: int | None = None, group: dist.ProcessGroup | None = None,
) -> Path:  # fmt: skip
    """Write ROOT/step-<step>; see `trimtab.checkpoint.folder` for what is in it. Every rank of the group must call.

    Call it between optimizer steps: gradients and `main_grad` are not saved. Experts are saved as [E, …] whatever
    ranks they lie on, and load at any other layout. Generators other than the default ones and the routers' are not
    known here: put their states into `rank_extra`.

    Args:
        root: one folder for all ranks, on whatever hosts they are.
        model: plain, or under `parallelize`, `fully_shard_moe`, `ddp`, transformers' own sharding or torch.compile;
            the same modules on every rank.
        optimizer: its state is saved too; of a model alone if not given.
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
    given = _config_file(model) if files is None else files
    tensors: dict[str, Tensor] = {}
    groups: of_model.Groups | None = None

    def collect() -> dict[str, object]:
        nonlocal groups
        in_files.check_given(step, extra, given)
        if keep is not None:
            check_sizes(keep=keep)
        if rank_extra is not None:
            of_ranks.check_readable(rank_extra)
        tensors.update(of_model.model_tensors(model))
        if optimizer is not None:
            state, groups = of_model.optimizer_state(model, optimizer)
            tensors.update(state)
        kind = "none" if optimizer is None else type(optimizer).__name__
        return {"root": str(root), "step": step, "keep": keep, "optimizer": kind}

    _check_same(of_ranks.on_every_rank(collect, group))
    unfinished = of_ranks.on_first_rank(lambda: on_disk.begin(root, step), group)
    in_files.write_dcp(unfinished, tensors, group)

    def write_own() -> None:
        path = unfinished / on_disk.rank_file(_place(group)[0])
        state = of_ranks.rank_state(model, rank_extra)
        try:
            torch.save(state, path)
        except RuntimeError as error:
            raise InputError(f"{path}: {error}{full_disk(root)}") from error
        on_disk.sync(path)

    ranks = len(of_ranks.on_every_rank(write_own, group))  # and so all have written

    def end() -> Path:
        _check_gathered(unfinished, ranks)
        in_files.write_files(unfinished, given)
        index = in_files.make_index(
            step=step, world=ranks, experts=of_model.expert_shapes(model), optimizer=groups, extra=extra or {}
        )
        on_disk.write_index(unfinished, index)
        folder = on_disk.finish(unfinished)
        others = [path for path in on_disk.whole_checkpoints(root) if path != folder]
        for old in others[: max(0, len(others) + 1 - keep)] if keep else ():
            on_disk.remove(old)
        return folder

    return of_ranks.on_first_rank(end, group)


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's, and how many there are."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _check_same(given: list[dict[str, object]]) -> None:
    """Raise InputError, on every rank, where the ranks hand in different values."""
    for name, first in given[0].items():
        if any(one[name] != first for one in given):
            said = ", ".join(f"rank {rank}: {one[name]}" for rank, one in enumerate(given))
            raise InputError(f"save: {name} is not the same on all ranks ({said}); hand in one and the same")


def _check_gathered(unfinished: Path, ranks: int) -> None:
    """Raise InputError where a rank's file is not there: its host has another folder of that name."""
    names = {rank: on_disk.rank_file(rank) for rank in range(ranks)}
    if missing := [rank for rank, name in names.items() if not (unfinished / name).is_file()]:
        raise InputError(
            f"{unfinished}: rank(s) {', '.join(map(str, missing))} wrote elsewhere: {names[missing[0]]} is not there; "
            "save to a folder that all hosts share"
        )


def _config_file(model: nn.Module) -> dict[str, str | bytes]:
    """config.json of a transformers model, without what is about this run's ranks."""
    config = getattr(of_model.unwrapped(model), "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    assert config is not None
    fields = json.loads(config.to_json_string(use_diff=False))
    fields.pop("distributed_config", None)
    return {on_disk.CONFIG: json.dumps(fields, indent=2, sort_keys=True) + "\n"}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """folder, index: of the checkpoint.
    own: this rank's state, with what it saved as `rank_extra` under "extra"; None where another number of ranks
        wrote the checkpoint.
    """

    folder: Path
    index: Index
    own: of_ranks.State | None

    def restore_random(self) -> None:
        """Once more, for what draws numbers between loading and the first step, as a DataLoader does."""
        if self.own is not None:
            of_ranks.set_random(self.own["random"])


def load(
    path: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
    group: dist.ProcessGroup | None = None,
) -> Loaded:  # fmt: skip
    """Load a checkpoint, or the latest below a folder, at whatever layout the model has. All ranks must call.

    Parameters, buffers and optimizer state are those that were saved, bit for bit. So are random numbers if there are
    as many ranks as then; if not, they are left as they are, and loads of an unfinished step are shared out.
    Values are overwritten in place; an optimizer's state is made where it is missing, without a step.

    At the same layout what follows is bit for bit what would have followed, except under torch's DDP on three ranks or
    more, which sorts its buckets anew after its first backward. At another layout all ranks that hold an expert begin
    with one state of its recipe; each had its own.

    Args:
        path: a checkpoint, or the `root` of several.
        model, group: as for `save`.
        optimizer: its state is loaded too; not read if not given.

    Raises, on every rank and before anything is changed:
        InputError: no whole checkpoint, one of another format, or one with a file that cannot be read. Of the tensors'
            own files only their sizes are known before: where reading one fails, what was read until then has been
            overwritten. There are no checksums: bytes that changed within a value load as another value.
        ConfigError: tensors that only one of both has, or that have another shape, number of experts or dtype.
    """
    rank, ranks = _place(group)
    plan: dict[str, Any] = {}

    def check() -> tuple[str, int]:
        folder = on_disk.resolve(path)
        index, found, into = on_disk.read_index(folder), in_files.stored(folder), of_model.model_tensors(model)
        _check_model(folder, found, into)
        if optimizer is not None:
            if index.optimizer is None:
                raise ConfigError(f"{folder}: holds no optimizer state; load the model alone, or another checkpoint")
            state, plan["put"] = of_model.optimizer_targets(model, optimizer, found, index.optimizer)
            into |= state
        states = _rank_states(folder, index.world, rank, ranks, bool(routers(of_model.unwrapped(model))))
        plan.update(folder=folder, index=index, into=into, states=states)
        return folder.name, index.step

    seen = of_ranks.on_every_rank(check, group)
    if len(set(seen)) > 1:
        names = ", ".join(f"rank {rank}: {name}" for rank, (name, _) in enumerate(seen))
        raise InputError(
            f"{path}: the ranks see different checkpoints ({names}); name one, or wait for the file system"
        )
    index, states = plan["index"], plan["states"]
    in_files.read_dcp(plan["folder"], plan["into"], group)
    if optimizer is not None:
        plan["put"]()
    own = states[0] if index.world == ranks else None
    if own is not None:
        of_ranks.put_rank_state(model, own)
    else:
        of_ranks.put_loads(model, states, rank, ranks)
    return Loaded(folder=plan["folder"], index=index, own=own)


def _check_model(folder: Path, found: Mapping[str, Any], into: Mapping[str, Tensor]) -> None:
    """Raise ConfigError with everything that is wrong."""
    problems = []
    saved = {key for key in found if key.startswith(MODEL)}
    for what, keys in (("lacks", set(into) - saved), ("has, and the model has not,", saved - set(into))):
        if keys:
            problems.append(f"the checkpoint {what} {of_model.some({key.removeprefix(MODEL) for key in keys})}")
    for key in sorted(saved & set(into)):
        tensor, size, dtype = into[key], found[key].size, found[key].properties.dtype
        name = key.removeprefix(MODEL)
        if tensor.dtype != dtype:
            problems.append(f"{name} is {dtype} in the checkpoint, {tensor.dtype} here")
        elif tensor.size() != size:
            problems.append(f"{name} is {tuple(size)} in the checkpoint, {tuple(tensor.shape)} here")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(f"{folder} does not fit the model: {'; '.join(problems[:5])}{more}")


def _rank_states(folder: Path, world: int, rank: int, ranks: int, loads: bool) -> list[of_ranks.State]:
    """This rank's own file; where the number of ranks is another those of all, if there are loads to share out."""
    states = []
    for number in [rank] if world == ranks else range(world) if loads else []:
        path = folder / on_disk.rank_file(number)
        try:
            states.append(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # what torch.load raises for a damaged file depends on where it is damaged
            raise in_files.unreadable(path, error) from error
    return states
