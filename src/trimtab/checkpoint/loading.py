"""Loading: everything is checked against the checkpoint before anything is overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint.agree import on_every_rank
from trimtab.checkpoint.folder import MODEL, Index
from trimtab.checkpoint.rank_state import State, put_loads, put_rank_state, set_random
from trimtab.checkpoint.state import (
    fits_another_width,
    give_new_buffers,
    model_tensors,
    optimizer_targets,
    put_optimizer,
    unwrapped,
)
from trimtab.checkpoint.tensors import read_dcp, stored, unreadable
from trimtab.errors import ConfigError, InputError
from trimtab.routing.bias import routers


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """folder, index: of the checkpoint.
    own: this rank's state, with what it saved as `rank_extra` under "extra"; None where another number of ranks
        wrote the checkpoint.
    """

    folder: Path
    index: Index
    own: State | None

    def restore_random(self) -> None:
        """Once more, for what draws numbers between loading and the first step, as a DataLoader does."""
        if self.own is not None:
            set_random(self.own["random"])


def load(
    path: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint, or the latest below a folder, at whatever layout the model has. All ranks must call.

    Parameters, buffers and optimizer state are those that were saved, bit for bit. So are random numbers if there are
    as many ranks as then; if not, they are left as they are, and loads of an unfinished step are shared out.
    Values are overwritten in place; an optimizer's state is made where it is missing, without a step.

    At the same layout what follows is bit for bit what would have followed, except under torch's DDP on three ranks or
    more, which sorts its buckets anew after its first backward. At another layout copies and shares of an expert begin
    with one state of its recipe; each had its own.

    Args:
        path: a checkpoint, or the `root` of several.
        model, optimizer, group: as for `save`. Without an optimizer its state in the checkpoint is not read.

    Raises, on every rank and before anything is changed:
        InputError: no whole checkpoint, one of another format, or one with a file that cannot be read. Of the tensors'
            own files only their sizes are known before: where reading one fails, what was read until then has been
            overwritten. There are no checksums: bytes that changed within a value load as another value.
        ConfigError: tensors that only one of both has, or that have another shape, number of experts or dtype.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0

    def check() -> Any:
        folder = on_disk.resolve(path)
        index, found, into = on_disk.read_index(folder), stored(folder), model_tensors(model)
        new = _check_model(folder, found, into)
        slots = None
        if optimizer is not None:
            if index.optimizer is None:
                raise ConfigError(f"{folder}: holds no optimizer state; load the model alone, or another checkpoint")
            state, slots = optimizer_targets(model, optimizer, found, index.optimizer)
            into |= state
        states = _rank_states(folder, index.world, rank, ranks, bool(routers(unwrapped(model))))
        return folder, index, into, new, slots, states

    plan: list[Any] = []

    def agreed() -> tuple[str, int]:
        plan.extend(check())
        return plan[0].name, plan[1].step

    found = on_every_rank(agreed, group)
    if len(set(found)) > 1:
        names = ", ".join(f"rank {rank}: {name}" for rank, (name, _) in enumerate(found))
        raise InputError(
            f"{path}: the ranks see different checkpoints ({names}); name one, or wait for the file system"
        )
    folder, index, into, new, slots, states = plan
    read_dcp(folder, {**into, **new}, group)
    give_new_buffers(model, new)
    if optimizer is not None:
        put_optimizer(model, optimizer, slots, index.optimizer)
    own = states[0] if index.world == ranks else None
    if own is not None:
        put_rank_state(model, own)
    else:
        put_loads(model, states, rank, ranks)
    return Loaded(folder=folder, index=index, own=own)


def _check_model(
    folder: Path, found: Mapping[str, TensorStorageMetadata], into: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """New tensors for the buffers that cannot be filled in place. Raises ConfigError with everything that is wrong."""
    problems, new = [], {}
    saved = {key for key in found if key.startswith(MODEL)}
    for what, keys in (("lacks", set(into) - saved), ("has, and the model has not,", saved - set(into))):
        if keys:
            names = sorted(key.removeprefix(MODEL) for key in keys)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"the checkpoint {what} {', '.join(names[:3])}{more}")
    for key in sorted(saved & set(into)):
        tensor, size, dtype = into[key], found[key].size, found[key].properties.dtype
        name = key.removeprefix(MODEL)
        if tensor.dtype != dtype:
            problems.append(f"{name} is {dtype} in the checkpoint, {tensor.dtype} here")
        elif tensor.size() != size:
            if fits_another_width(tensor, size):
                new[key] = torch.zeros(size, dtype=dtype, device=tensor.device)
                continue
            problems.append(f"{name} is {tuple(size)} in the checkpoint, {tuple(tensor.shape)} here")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(f"{folder} does not fit the model: {'; '.join(problems[:5])}{more}")
    return new


def _rank_states(folder: Path, world: int, rank: int, ranks: int, loads: bool) -> list[State]:
    """This rank's own file; where the number of ranks is another those of all, if there are loads to share out."""
    wanted = [rank] if world == ranks else range(world) if loads else []
    return [_rank_state(folder / on_disk.rank_file(r)) for r in wanted]


def _rank_state(path: Path) -> State:
    try:
        return cast(State, torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # what torch.load raises for a damaged file depends on where it is damaged
        raise unreadable(path, error) from error
