"""Tokens that all ranks of a tensor-parallel group hold: each rank takes its share of the positions.

    x [B, L, D] on every rank  --take-->  [B, l, D], this rank's positions of every sequence  --join-->  y [B, L, D]

Shares are as even as can be; they may differ by one position and be empty (L < ranks).

Legend: B batch, L positions, l positions of this rank, D width.
"""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor

from trimtab.backward import not_a_view
from trimtab.dispatch.sequence_shard import shard, take_shard, unshard
from trimtab.layout import SequenceLayout


class ReplicatedTokens:
    """`trimtab.moe.Tokens` over `group`, whose ranks hold the same tokens and the same gradient of the output."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def take(self, t: Tensor) -> Tensor:
        """[*lead, L, any] -> [*lead, l, any]. No communication; one all-gather in the backward."""
        layout = self._layout(t)
        rows = t.reshape(layout.batch * layout.length, t.shape[-1])
        mine = shard(rows, layout, self.group) if t.is_floating_point() else take_shard(rows, layout, self.rank)
        return mine.view(*t.shape[:-2], layout.shard_length(self.rank), t.shape[-1])

    def join(self, y: Tensor, like: Tensor) -> Tensor:
        """[*lead, l, D] -> [*lead, L, D], the same on every rank. One all-gather; none in the backward."""
        layout = self._layout(like)
        rows = y.reshape(layout.tokens(self.rank), y.shape[-1])
        return not_a_view(unshard(rows, layout, self.group), like.shape)

    def _layout(self, t: Tensor) -> SequenceLayout:
        return SequenceLayout.even(math.prod(t.shape[:-2]), t.shape[-2], self.ranks)
