"""All-to-all(v) on a process group: each row goes straight to the rank that needs it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.transport import Headers, Lanes, guard_for, watched
from trimtab.guard.guard import Guard


class AllToAll:
    """Transport over `torch.distributed.all_to_all_single`, for any backend that has it (NCCL, Gloo, MPI …).

    Args:
        group: the expert group.
        guard: True for a guard of its own, False for none, or the guard that several transports of the group share.
            The same on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, guard: Guard | bool = True) -> None:
        self.group = group
        self.guard = guard_for(group, guard)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange_headers(self, headers_PC: Tensor) -> Headers:
        received_PC = torch.empty_like(headers_PC)
        watched(self.guard, dist.all_to_all_single, received_PC, headers_PC, group=self.group)
        sent, received = torch.stack((headers_PC, received_PC)).tolist()
        return Headers(sent=sent, received=received, everyone=[])

    def spread(self, table_TB: Tensor, row_token_M: Tensor, lanes: Lanes, tokens: tuple[int, ...]) -> Tensor:
        return self.move(table_TB.index_select(0, row_token_M), lanes)

    def move(self, rows_MB: Tensor, lanes: Lanes) -> Tensor:
        received = rows_MB.new_empty(sum(lanes.incoming), rows_MB.shape[1])
        splits = (list(lanes.incoming), list(lanes.outgoing))
        watched(self.guard, dist.all_to_all_single, received, rows_MB, *splits, group=self.group)
        return received
