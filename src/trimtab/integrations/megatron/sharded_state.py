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
from trimtab.experts.linear import convert_state
from trimtab.integrations.megatron.expert_linear import ExpertLinear

EXTRA = "_extra_state"


def sharded_state(
    experts: Any, prefix: str, sharded_offsets: Sequence[Any], metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """See `Experts.sharded_state_dict`. `singleton_local_shards` in the metadata: each expert under keys of its own."""
    singleton = bool((metadata or {}).get("singleton_local_shards", False))
    e, rank, ranks = experts.num_local_experts, experts.ep_group.rank(), experts.ep_group.size()
    first, copy = rank * e, experts.dp_group.rank()
    state: dict[str, Any] = {}
    for name in ("linear_fc1", "linear_fc2"):
        linear = getattr(experts, name)
        for own, param in linear.named_parameters():
            kind, number = re.fullmatch(r"(weight|bias)(\d*)", own).groups()  # type: ignore[union-attr]
            which = [first + int(number)] if number else [first + i for i in range(e)]
            shards = partial(
                _shards, linear=linear, tail=f"{name}.{kind}", experts=which, num_experts=e * ranks,
                offsets=tuple(sharded_offsets), singleton=singleton, stacked=not number,
            )  # fmt: skip
            merge = partial(_merged, pieces=_pieces(linear, kind), stacked=not number)
            key = f"{prefix}experts.{name}.{kind}"
            state[f"{prefix}{name}.{own}"] = ShardedTensorFactory(key, param, shards, merge, (0, 0, copy))
        for i in range(e):
            key, shape, offset = f"{prefix}experts.{name}.{EXTRA}", (*_sizes(sharded_offsets), e * ranks), first + i
            at = (*_starts(sharded_offsets), offset)
            if singleton:
                key = f"{prefix}experts.{offset}.{name}.{EXTRA}"
                shape, at = _sizes(sharded_offsets) or (1,), _starts(sharded_offsets) or (0,)
            replica = (0, experts.tp_group.rank(), copy)
            state[f"{prefix}{name}.{EXTRA}{i}"] = ShardedObject(key, None, shape, at, replica)
    return state


def _starts(offsets: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(start for _, start, _ in sorted(offsets))


def _sizes(offsets: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(size for _, _, size in sorted(offsets))


def _pieces(linear: ExpertLinear, kind: str) -> int:
    """Into how many shards one expert's tensor goes."""
    return linear.halves if linear.cut == 0 or kind == "weight" else 1


@torch.no_grad()
def _shards(
    key: str, t: Tensor, replica_id: Any, flattened_range: slice | None, *, linear: ExpertLinear, tail: str,
    experts: Sequence[int], num_experts: int, offsets: tuple[Any, ...], singleton: bool, stacked: bool,
) -> list[ShardedTensor]:  # fmt: skip
    """Those of a parameter, or of an optimizer's state of it: expert by expert, gate before up."""
    if flattened_range is not None:
        raise InputError(f"{key} comes as a range of its elements: save by 'fully_reshardable' or 'dp_reshardable'")
    kind = tail.rpartition(".")[2]
    pieces, cut = _pieces(linear, kind), linear.cut == 0 or kind == "weight"
    before, rank, ranks = len(offsets) + (not singleton), linear.tp_rank, linear.tp_size
    found = []
    for expert, whole in zip(experts, t if stacked else [t], strict=True):
        for i, part in enumerate(whole.chunk(pieces, linear.cut)):
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
    each = [
        torch.cat(tuple(loaded[i : i + pieces])) if pieces > 1 else loaded[i] for i in range(0, len(loaded), pieces)
    ]
    return torch.stack(each) if stacked else each[0]


def local_state(experts: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Bring a plain state dict to the names of `experts`, in place: from SequentialMLP's, or from the other form of
    their own. Extra states are dropped: there are none."""
    for key in [key for key in state if key.startswith(prefix)]:
        own = key.removeprefix(prefix)
        if EXTRA in own:
            del state[key]
        elif found := re.fullmatch(r"local_experts\.(\d+)\.(linear_fc[12]\.(weight|bias))", own):
            state[f"{prefix}{found[2]}{found[1]}"] = state.pop(key)
    for name in ("linear_fc1", "linear_fc2"):
        linear: ExpertLinear = getattr(experts, name)
        for kind in ("weight", "bias"):
            convert_state(
                state, f"{prefix}{name}.", kind, experts.num_local_experts, stacked=linear.single_parameter
            )  # fmt: skip
