"""All-gather on a process group: every rank sees every row and keeps its own. For small groups and for checks.

Gloo's all-gather takes equal sizes only, so tables are padded to the longest; padding is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.over_group import OverGroup, pack, read, unpack, watched
from trimtab.dispatch.transport import Handshake, SplitSizes
from trimtab.guard.guard import Guard


def all_gather_tensor() -> Callable[..., Any]:
    """torch's all-gather into one tensor, (output, input, group=, async_op=), by its name in this torch."""
    single: Callable[..., Any] | None = getattr(dist, "all_gather_single", None)  # torch 2.13 has renamed it
    return dist.all_gather_into_tensor if single is None else single


def gather_uneven(rows: Tensor, longest: int, group: dist.ProcessGroup, guard: Guard | None = None) -> Tensor:
    """Each rank's rows, padded to `longest`: [P, longest, …]. Collective."""
    padded = rows.new_empty(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    ranks = dist.get_world_size(group)
    gathered = rows.new_empty(ranks * longest, *rows.shape[1:])
    watched(guard, all_gather_tensor(), (gathered, padded), group=group)
    return gathered.view(ranks, longest, *rows.shape[1:])


class AllGather(OverGroup):
    """Transport over torch's all-gather into one tensor. Same results as `AllToAll`, bit for bit.

    Args:
        group, guard: as in `AllToAll`.
    """

    def handshake(self, message_PC: Tensor) -> Handshake:
        self.refuse_without_values(message_PC)
        everyone = read(self.guard, gather_uneven(message_PC, self.size, self.group, self.guard))
        return Handshake(sent=everyone[self.rank], received=[row[self.rank] for row in everyone], everyone=everyone)

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        tables = gather_uneven(pack(tensors), max(tokens), self.group, self.guard)
        indices = gather_uneven(row_token_M, max(sum(row) for row in splits.everyone), self.group, self.guard)
        mine = [indices[source, start:end] for source, (start, end) in enumerate(self._segments(splits))]
        return unpack(torch.cat([tables[source].index_select(0, index) for source, index in enumerate(mine)]), tensors)

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        rows = gather_uneven(pack(tensors), max(sum(row) for row in splits.everyone), self.group, self.guard)
        parts = [rows[source, start:end] for source, (start, end) in enumerate(self._segments(splits))]
        return unpack(torch.cat(parts), tensors)

    def _segments(self, splits: SplitSizes) -> list[tuple[int, int]]:
        """(start, end) in each rank's outgoing rows of those for this rank."""
        cuts = [[0, *accumulate(row)] for row in splits.everyone]
        return [(cut[self.rank], cut[self.rank + 1]) for cut in cuts]
