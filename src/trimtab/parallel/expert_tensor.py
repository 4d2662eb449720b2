"""Experts split over F on several ranks: every rank of the group sees the rows of all, and gives a part of the sum.

    gather   own rows -> rows of all ranks, in the order of ranks      backward: parts of the gradient, summed at home
    reduce   parts for the rows of all ranks -> sums of own rows       backward: gather

Each is the transpose of the other. Numbers of rows may differ and be zero. Sums are taken in the order of ranks,
in float32 at least, so they are the same from run to run.

Legend: M' rows of this rank, P ranks of the group, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from trimtab.dispatch.allgather import all_gather_tensor, gather_uneven
from trimtab.dispatch.packing import pack, unpack


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Rows of each rank of a group, on the host, for one call. num_slots: kept slots of all, where known."""

    group: dist.ProcessGroup
    rows_P: tuple[int, ...]
    num_slots: int | None

    @classmethod
    def exchange(cls, group: dist.ProcessGroup, rows: Tensor, num_slots: int | None) -> Lines:
        """Tell the group how many rows and slots this rank has. Collective; one host sync."""
        mine = torch.tensor([rows.shape[0], -1 if num_slots is None else num_slots], device=rows.device)
        told = mine.new_empty(dist.get_world_size(group) * 2)
        all_gather_tensor()(told, mine, group=group)
        counts, slots = told.view(-1, 2).T.tolist()
        return cls(group=group, rows_P=tuple(counts), num_slots=None if min(slots) < 0 else sum(slots))

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        gathered = gather_uneven(pack(tensors), max(self.rows_P), self.group)
        packed = torch.cat([gathered[rank, :rows] for rank, rows in enumerate(self.rows_P)])
        return [part.contiguous() for part in unpack(packed, tensors)]

    def reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        ranks, mine = len(self.rows_P), self.rows_P[dist.get_rank(self.group)]
        packed = pack(tensors)
        received = packed.new_empty(ranks * mine, packed.shape[1])
        dist.all_to_all_single(received, packed, [mine] * ranks, list(self.rows_P), group=self.group)
        return [_summed(part, ranks, mine) for part in unpack(received, tensors)]


def _summed(parts: Tensor, ranks: int, rows: int) -> Tensor:
    wide = parts.to(torch.promote_types(parts.dtype, torch.float32))
    return wide.view(ranks, rows, parts.shape[1]).sum(0).to(parts.dtype)


class GatherRows(Function):
    """(x [M', D], weights, ids) of this rank -> the same of all ranks."""

    @staticmethod
    def forward(ctx: Any, lines: Lines, x: Tensor, w: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.lines = lines
        all_x, all_w, all_ids = lines.gather([x, w, ids])
        ctx.mark_non_differentiable(all_ids)
        return all_x, all_w, all_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dw: Tensor, _: Tensor) -> tuple[None, Tensor, Tensor, None]:
        own_dx, own_dw = ctx.lines.reduce([dx, dw])
        return None, own_dx, own_dw, None


class ReduceRows(Function):
    """Each rank's part of the sums of all ranks' rows -> the sums of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, lines: Lines, y: Tensor) -> Tensor:
        ctx.lines = lines
        return lines.reduce([y])[0].view(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, ctx.lines.gather([dy])[0]


class SplitBias(Function):
    """A bias [e, I] that all ranks hold -> the part [e, I / P] of this rank. Backward: the parts, put together."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, parts: int, group: dist.ProcessGroup) -> Tensor:
        ctx.parts, ctx.group, ranks = parts, group, dist.get_world_size(group)
        return bias.view(bias.shape[0], parts, ranks, -1)[:, :, dist.get_rank(group)].reshape(bias.shape[0], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        every = gather_uneven(d, d.shape[0], ctx.group).view(-1, d.shape[0], ctx.parts, d.shape[1] // ctx.parts)
        return every.permute(1, 2, 0, 3).reshape(d.shape[0], -1), None, None


class FirstRankBias(Function):
    """A bias that all ranks hold, as it is on the group's rank 0 and zeros elsewhere: the sum has it once.

    Every rank sees the gradients of all rows, so each computes the bias's whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
        return bias.clone() if dist.get_rank(group) == 0 else torch.zeros_like(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d, None
