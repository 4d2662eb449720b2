"""All-to-all(v) on a process group: each row goes straight to the rank that needs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.packing import gather_packed, pack, packed_already, row_bytes, unpack
from trimtab.dispatch.transport import Headers, Lanes, OverGroup, refuse_without_values, watched
from trimtab.dispatch.workspace import Workspace
from trimtab.guard.guard import Guard

PACKED_BYTES = 1 << 20
"""Of a rank's tokens. Rows of more than one tensor that are given as they are, and not gathered, travel packed up to
here: beyond, on the CPU, it takes longer to copy them into packed rows than to send each tensor by itself."""


class AllToAll(OverGroup):
    """Transport over `torch.distributed.all_to_all_single`, for any backend that has it (NCCL, Gloo, MPI …).

    On the CPU it keeps the memory of rows that nobody uses any more, and puts the next rows into it.

    Args:
        group: the expert group.
        guard: True for a guard of its own, False for none, or the guard that several transports of the group share.
            The same on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, guard: Guard | bool = True) -> None:
        super().__init__(group, guard=guard)
        self._workspace = Workspace()

    def exchange_headers(self, headers_PC: Tensor) -> Headers:
        refuse_without_values(headers_PC, self.rank)
        received_PC = torch.empty_like(headers_PC)
        watched(self.guard, dist.all_to_all_single, received_PC, headers_PC, group=self.group)
        sent, received = torch.stack((headers_PC, received_PC)).tolist()
        return Headers(sent=sent, received=received, everyone=[])

    def spread(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, lanes: Lanes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        rows_MB = self._rows(row_token_M.shape[0], tensors)
        return self._send(gather_packed(tensors, row_token_M, out=rows_MB), tensors, lanes)

    def move(self, tensors: Sequence[Tensor], lanes: Lanes, tokens: tuple[int, ...]) -> list[Tensor]:
        large = max(tokens) * row_bytes(tensors) > PACKED_BYTES and tensors[0].device.type == "cpu"
        parts = [[tensor] for tensor in tensors] if large else [tensors]
        return [received for part in parts for received in self._move(part, lanes)]

    def _move(self, tensors: Sequence[Tensor], lanes: Lanes) -> list[Tensor]:
        rows_MB = None if packed_already(tensors) else self._rows(tensors[0].shape[0], tensors)
        return self._send(pack(tensors, out=rows_MB), tensors, lanes)

    def _send(self, rows_MB: Tensor, like: Sequence[Tensor], lanes: Lanes) -> list[Tensor]:
        received = self._rows(sum(lanes.incoming), like)
        splits = (list(lanes.incoming), list(lanes.outgoing))
        watched(self.guard, dist.all_to_all_single, received, rows_MB, *splits, group=self.group)
        return unpack(received, like)

    def _rows(self, rows: int, like: Sequence[Tensor]) -> Tensor:
        """Memory for packed rows, [rows, B]."""
        width = row_bytes(like)
        if like[0].device.type != "cpu":
            return like[0].new_empty(rows, width, dtype=torch.uint8)
        return self._workspace.take(rows * width).bytes(rows * width).view(rows, width)
