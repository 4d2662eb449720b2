"""Experts in Megatron's distributed checkpoints: the keys and shards of SequentialMLP, whatever the parameters' form.

    PREFIX experts.linear_fc1.weight         global [E, 2F, H], gate and up two shards of [F, H] for each expert
    PREFIX experts.linear_fc2.weight         global [E, H, F]
    PREFIX experts.linear_fc1._extra_state   an empty object for each expert, which Megatron's experts look for

Optimizers find a parameter's shards by the parameter itself, and cut their states, of the same shape, like it.

Legend: e local experts, E experts, F hidden size of an expert, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from trimtab.errors import InputError

EXTRA = "_extra_state"


def sharded_state(
    experts: Any, prefix: str, sharded_offsets: Sequence[Any], metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """See `Experts.sharded_state_dict`. `singleton_local_shards` in the metadata: each expert under keys of its own."""
    state: dict[str, Any] = {}
    for name in ("linear_fc1", "linear_fc2"):
        linear = getattr(experts, name)
        found = linear_state(linear, experts, f"{prefix}experts.", name, sharded_offsets, metadata)
        state.update({f"{prefix}{name}.{own}": value for own, value in found.items()})
    return state


def linear_state(
    linear: Any, of: Any, before: str, name: str, sharded_offsets: Sequence[Any], metadata: dict[str, Any] | None,
    *, whole: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """One linear's parameters and empty extra states, by their own names; keys are `before`, then `name` and the kind.

    Args:
        linear: has `cut`, `halves`, `tp_rank` and `tp_size` of an `ExpertLinear`. of: has `num_local_experts`, and the
            groups `ep_group`, `tp_group` and `dp_group`.
        whole: a parameter of one expert is a shard as it is: TEGroupedMLP parts gate and up itself.
    """
    singleton = bool((metadata or {}).get("singleton_local_shards", False))
    e, rank, ranks = of.num_local_experts, of.ep_group.rank(), of.ep_group.size()
    first, copy = rank * e, of.dp_group.rank()
    state: dict[str, Any] = {}
    for own, param in linear.named_parameters():
        kind, number = re.fullmatch(r"(weight|bias)(\d*)", own).groups()  # type: ignore[union-attr]
        which = [first + int(number)] if number else [first + i for i in range(e)]
        cut = linear.cut == 0 or kind == "weight"
        pieces = linear.halves if cut and not whole else 1
        shards = partial(
            _shards, linear=linear, tail=f"{name}.{kind}", experts=which, num_experts=e * ranks, cut=cut, pieces=pieces,
            offsets=tuple(sharded_offsets), singleton=singleton, stacked=not number,
        )  # fmt: skip
        key, replica = f"{before}{name}.{kind}", (0, 0, copy)
        if whole:
            (state[own],) = shards(key, param, replica, None)
        else:
            merge = partial(_merged, pieces=pieces, stacked=not number)
            state[own] = ShardedTensorFactory(key, param, shards, merge, replica)
    starts, sizes = (tuple(part[at] for part in sorted(sharded_offsets)) for at in (1, 2))
    for i in range(e):
        key, shape, at = f"{before}{name}.{EXTRA}", (*sizes, e * ranks), (*starts, first + i)
        if singleton:
            key, shape, at = f"{before}{first + i}.{name}.{EXTRA}", sizes or (1,), starts or (0,)
        state[f"{EXTRA}{i}"] = ShardedObject(key, None, shape, at, (0, of.tp_group.rank(), copy))
    return state


@torch.no_grad()
def _shards(
    key: str, t: Tensor, replica_id: Any, flattened_range: slice | None, *, linear: Any, tail: str,
    experts: Sequence[int], num_experts: int, cut: bool, pieces: int, offsets: tuple[Any, ...], singleton: bool,
    stacked: bool,
) -> list[ShardedTensor]:  # fmt: skip
    """Those of a parameter, or of an optimizer's state of it: expert by expert, gate before up."""
    if flattened_range is not None:
        raise InputError(f"{key} comes as a range of its elements: save by 'fully_reshardable' or 'dp_reshardable'")
    before, rank, ranks = len(offsets) + (not singleton), linear.tp_rank, linear.tp_size
    found = []
    for expert, whole in zip(experts, t if stacked else [t], strict=True):
        for i, part in enumerate(whole.chunk(pieces, linear.cut) if pieces > 1 else [whole]):
            at, own_key = offsets, key
            if singleton:
                own_key = f"{key.removesuffix(tail)}{expert}.{tail}" + ("_w", "_v")[i] * (pieces > 1)
                place = (before + linear.cut, rank, ranks)
            else:
                at = (*offsets, (len(offsets), expert, num_experts))
                place = (before + linear.cut, i * ranks + rank, pieces * ranks)
            found.append(
                ShardedTensor.from_rank_offsets(
                    own_key, part, *at, *([place] if cut else []), replica_id=replica_id, prepend_axis_num=before
                )
            )
    return found


@torch.no_grad()
def _merged(loaded: Sequence[Tensor], *, pieces: int, stacked: bool) -> Tensor:
    """The way back."""
    own = [torch.cat(tuple(loaded[i : i + pieces])) if pieces > 1 else loaded[i] for i in range(0, len(loaded), pieces)]
    return torch.stack(own) if stacked else own[0]


def local_state(experts: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Bring a plain state dict to the names of `experts`, in place, from SequentialMLP's, without extra states."""
    for key in [key for key in state if key.startswith(prefix)]:
        own = key.removeprefix(prefix)
        if EXTRA in own:
            del state[key]
        elif found := re.fullmatch(r"local_experts\.(\d+)\.(linear_fc[12]\.(weight|bias))", own):
            state[f"{prefix}{found[2]}{found[1]}"] = state.pop(key)
