"""Sequence shards of what a group holds in full: `shard` takes this rank's positions of every sequence, `unshard` puts
all ranks' together, and each is the other's backward. Shards may differ in length or be empty.

Legend: L positions, l positions of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import once_differentiable
from trimtab.dispatch.all_gather import gather_uneven
from trimtab.errors import InputError
from trimtab.layout import shard_cuts


def take_shard(x: Tensor, cuts: Sequence[int], rank: int) -> Tensor:
    """[*lead, L, D] -> this rank's [*lead, l, D], contiguous."""
    return x[..., cuts[rank] : cuts[rank + 1], :].contiguous()


def join_shards(x: Tensor, cuts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Each rank's [*lead, l, D] -> [*lead, L, D] on every rank. Collective; sizes come from the cuts."""
    lead, lengths = x.shape[:-2], [end - start for start, end in pairwise(cuts)]
    gathered = gather_uneven(x.flatten(0, -2), lead.numel() * max(lengths), group)
    shards = [gathered[r, : lead.numel() * n].view(*lead, n, x.shape[-1]) for r, n in enumerate(lengths)]
    return torch.cat(shards, dim=-2)


class _Moved(Function):
    """`take_shard`, or `join_shards` if joined; the backward is the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cuts: Sequence[int], group: dist.ProcessGroup, joined: bool) -> Tensor:
        ctx.where = cuts, group, joined
        return _moved(x, cuts, group, joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cuts, group, joined = ctx.where
        return _moved(dy, cuts, group, not joined), None, None, None


def _moved(x: Tensor, cuts: Sequence[int], group: dist.ProcessGroup, joined: bool) -> Tensor:
    return join_shards(x, cuts, group) if joined else take_shard(x, cuts, dist.get_rank(group))


def shard(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's share [*lead, l, D] of [*lead, L, D] that all ranks of `group` hold. No communication forward."""
    cuts = shard_cuts(x.shape[-2], dist.get_world_size(group))
    out: Tensor = _Moved.apply(x, cuts, group, False)  # type: ignore[no-untyped-call]
    return out


def unshard(x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """[*lead, L, D] of L = `length` positions, on every rank, from each rank's share as `shard` takes it. One
    all-gather. Raises InputError for another share."""
    cuts, rank = shard_cuts(length, dist.get_world_size(group)), dist.get_rank(group)
    if x.shape[-2] != cuts[rank + 1] - cuts[rank]:
        raise InputError(f"rank {rank} has {x.shape[-2]} of {length} positions, of the cuts {cuts}", phase="combine")
    out: Tensor = _Moved.apply(x, cuts, group, True)  # type: ignore[no-untyped-call]
    return out
