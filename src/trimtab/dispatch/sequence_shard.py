"""Sequence shards of tokens that a group holds in full: `shard` takes this rank's positions of every sequence,
`unshard` puts all ranks' together, and each is the other's backward. Shards may differ in length or be empty.

Legend: B batch, L positions, l positions of this rank, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import once_differentiable
from trimtab.dispatch.all_gather import gather_uneven
from trimtab.errors import InputError
from trimtab.layout import SequenceLayout


def take_shard(x: Tensor, layout: SequenceLayout, rank: int) -> Tensor:
    """[B * L, D] -> this rank's [B * l, D], contiguous."""
    start, end = layout.cuts[rank], layout.cuts[rank + 1]
    full = x.view(layout.batch, layout.length, *x.shape[1:])
    return full[:, start:end].reshape(layout.tokens(rank), *x.shape[1:]).contiguous()


def join_shards(x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """Each rank's [B * l, D] -> [B * L, D] on every rank. Collective; sizes come from the layout."""
    longest = max(layout.tokens(rank) for rank in range(layout.ranks))
    gathered = gather_uneven(x, longest, group)
    shards = [
        gathered[rank, : layout.tokens(rank)].view(layout.batch, layout.shard_length(rank), *x.shape[1:])
        for rank in range(layout.ranks)
    ]
    return torch.cat(shards, dim=1).view(layout.batch * layout.length, *x.shape[1:])


class _Moved(Function):
    """`take_shard`, or `join_shards` if joined; the backward is the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup, joined: bool) -> Tensor:
        ctx.where = layout, group, joined
        return _moved(x, layout, group, joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        layout, group, joined = ctx.where
        return _moved(dy, layout, group, not joined), None, None, None


def _moved(x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup, joined: bool) -> Tensor:
    return join_shards(x, layout, group) if joined else take_shard(x, layout, dist.get_rank(group))


def shard(x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """This rank's share [B * l, D] of tokens [B * L, D] that all ranks of `group` hold. No communication forward.

    Raises:
        InputError: `x` or the group does not have the layout's size.
    """
    _check(x.shape[0], layout.batch * layout.length, layout, group)
    out: Tensor = _Moved.apply(x, layout, group, False)  # type: ignore[no-untyped-call]
    return out


def unshard(x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """All tokens [B * L, D], on every rank, from each rank's [B * l, D]. One all-gather.

    Raises:
        InputError: `x` or the group does not have the layout's size.
    """
    _check(x.shape[0], layout.tokens(dist.get_rank(group)), layout, group)
    out: Tensor = _Moved.apply(x, layout, group, True)  # type: ignore[no-untyped-call]
    return out


def _check(tokens: int, expected: int, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
    if tokens != expected or dist.get_world_size(group) != layout.ranks:
        raise InputError(
            f"{tokens} tokens on a group of {dist.get_world_size(group)} ranks, but the layout has {expected} "
            f"tokens here and {layout.ranks} ranks",
            rank=dist.get_rank(group), phase="dispatch",
        )  # fmt: skip
