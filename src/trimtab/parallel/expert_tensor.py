"""Experts split over F on several ranks: every rank of the group sees the rows of all, and gives a part of the sum.

    dispatch  own rows -> rows of all ranks, in the order of ranks
    combine   parts for the rows of all ranks -> sums of own rows

Each is the transpose of the other, so they are a route between `Dispatch` and `Combine` of `dispatch.route`. Numbers
of rows may differ and be zero. Sums are taken in the order of ranks, in float32 at least, so they are the same from
run to run.

Legend: M' rows of this rank, P ranks of the group, e experts, F hidden dim.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import once_differentiable
from trimtab.dispatch.all_gather import all_gather_tensor, gather_uneven
from trimtab.dispatch.over_group import pack, unpack, watched
from trimtab.dispatch.route import Direction
from trimtab.dispatch.transport import layer_frame
from trimtab.errors import DesyncError
from trimtab.guard.guard import Guard


class ExpertTensorGroup:
    """The group over which one layer's F is split. `calls`: how often its ranks have met."""

    def __init__(self, group: dist.ProcessGroup, guard: Guard, layer: str) -> None:
        self.group, self.guard, self.layer, self.calls = group, guard, layer, 0
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._frame = layer_frame(layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertTensorGroup:
        return ExpertTensorGroup(self.group, self.guard, self.layer)

    def meet(self, rows: Tensor, num_slots: int | None, *, grad: bool = False) -> RowsOfAll:
        """Tell the group how many rows and slots this rank has, and whether they want gradients. Collective; one host
        sync.

        Raises:
            DesyncError: the ranks are not in the same call, on every rank.
            PeerLost, PhaseTimeout: a rank did not come, where the guard waits.
        """
        call, self.calls = self.calls, self.calls + 1
        slots = -1 if num_slots is None else num_slots
        tag = [call, zlib.crc32(self.layer.encode()), rows.element_size()]
        mine = torch.tensor([rows.shape[0], slots, int(grad), *tag], device=rows.device)
        told = mine.new_empty(self.size * mine.shape[0])
        self.run("forward", call, partial(watched, group=self.group), self.guard, all_gather_tensor(), told, mine)
        headers = told.view(self.size, -1).tolist()
        others = tuple(rank for rank, header in enumerate(headers) if header[3:] != tag)
        if others:
            calls = ", ".join(f"rank {rank}: call {header[3]}" for rank, header in enumerate(headers))
            raise DesyncError(
                f"rank(s) {', '.join(map(str, others))} of the expert-tensor-parallel group are in another layer or "
                f"call than rank {self.rank} ({calls}), or in another dtype. Every rank of it must run the same layers "
                "in the same order, under the same autocast",
                ranks=others, layer=self.layer, phase="experts",
            )  # fmt: skip
        known = None if min(header[1] for header in headers) < 0 else sum(header[1] for header in headers)
        wanted = any(header[2] for header in headers)
        return RowsOfAll(self, call, tuple(header[0] for header in headers), known, wanted)

    def run(self, direction: Direction, call: int, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args), collectives under the guard, at their place and below a stack frame with the layer's name."""
        with self.guard.alone(self.layer, "experts"):
            self.guard.at(self.layer, "experts", direction, call)
            out = self._frame(fn, *args)
        self.guard.at(self.layer, "experts", direction, call, "past")
        return out

    def gather(self, rows: Tensor, longest: int, direction: Direction, call: int) -> Tensor:
        """Each rank's rows, padded to `longest`: [P, longest, …]. Collective."""
        gathered: Tensor = self.run(direction, call, gather_uneven, rows, longest, self.group, self.guard)
        return gathered


class RowsOfAll:
    """One call's map from own rows to those of all ranks. rows_P: on the host. num_slots: kept slots of all. grad:
    whether any rank's rows want gradients."""

    def __init__(
        self, ranks: ExpertTensorGroup, call: int, rows_P: tuple[int, ...], num_slots: int | None, grad: bool
    ) -> None:
        self.ranks, self.call, self.rows_P, self.num_slots, self.grad = ranks, call, rows_P, num_slots, grad

    def dispatch(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        """Tensors [M', *] -> those of all ranks."""
        gathered = self.ranks.gather(pack(tensors), max(self.rows_P), direction, self.call)
        packed = torch.cat([gathered[rank, :rows] for rank, rows in enumerate(self.rows_P)])
        return [part.contiguous() for part in unpack(packed, tensors)]

    def combine(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        """Parts for all ranks' rows -> sums [M', *]."""
        ranks, mine = self.ranks.size, self.rows_P[self.ranks.rank]
        packed = pack(tensors)
        received = packed.new_empty(ranks * mine, packed.shape[1])
        exchange = partial(watched, self.ranks.guard, dist.all_to_all_single, group=self.ranks.group)
        self.ranks.run(direction, self.call, exchange, received, packed, [mine] * ranks, list(self.rows_P))
        return [_summed(part, ranks, mine) for part in unpack(received, tensors)]


def _summed(parts: Tensor, ranks: int, rows: int) -> Tensor:
    wide = parts.to(torch.promote_types(parts.dtype, torch.float32))
    return wide.view(ranks, rows, parts.shape[1]).sum(0).to(parts.dtype)


class FirstRankBias(Function):
    """A bias that all ranks hold, as it is on the group's rank 0 and zeros elsewhere: the sum has it once.

    Every rank sees the gradients of all rows, so each computes the bias's whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, ranks: ExpertTensorGroup) -> Tensor:
        return bias.clone() if ranks.rank == 0 else torch.zeros_like(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d, None
