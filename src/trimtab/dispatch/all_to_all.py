"""All-to-all(v) on a process group: each row goes straight to the rank that needs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.over_group import OverGroup, empty_rows, pack, read, row_bytes, unpack, watched
from trimtab.dispatch.transport import Handshake, SplitSizes
from trimtab.guard.guard import Guard
from trimtab.kernels.buffer_pool import HostBufferPool

PACKED_BYTES = 1 << 20
"""Bytes of a rank's tokens up to which rows of several tensors travel packed, where they are not gathered: beyond, on
the CPU, it takes longer to copy them into packed rows than to send each tensor by itself. Also of one row: where it is
longer, as an expert's weights are, each tensor is sent by itself, and comes out dense."""


class AllToAll(OverGroup):
    """Transport over `torch.distributed.all_to_all_single`, for any backend that has it (NCCL, Gloo, MPI …).

    On the CPU it keeps the memory of rows that nobody uses any more, and puts the next rows into it.

    Args:
        group: the ranks that share the experts.
        guard: True for a guard of its own, False for none, or the guard that several transports of the group share.
            The same on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, guard: Guard | bool = True) -> None:
        super().__init__(group, guard=guard)
        self._pool = HostBufferPool()

    def handshake(self, message_PC: Tensor) -> Handshake:
        self.refuse_without_values(message_PC)
        received_PC = torch.empty_like(message_PC)
        watched(self.guard, dist.all_to_all_single, (received_PC, message_PC), group=self.group)
        sent, received = read(self.guard, torch.stack((message_PC, received_PC)))
        return Handshake(sent=sent, received=received, everyone=[])

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        return self._send(tensors, row_bytes(tensors) > PACKED_BYTES, row_token_M, splits)

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        rows = max(tokens) if tensors[0].device.type == "cpu" else 1
        return self._send(tensors, rows * row_bytes(tensors) > PACKED_BYTES, None, splits)

    def _send(
        self, tensors: Sequence[Tensor], alone: bool, row_token_M: Tensor | None, splits: SplitSizes
    ) -> list[Tensor]:
        """alone: each tensor travels in rows of its own."""
        parts = [[tensor] for tensor in tensors] if alone else [tensors]
        rows = [pack(part, row_token_M, self._rows) for part in parts]
        received = [self._rows(sum(splits.incoming), part) for part in parts]
        sizes = list(splits.incoming), list(splits.outgoing)
        moves = ((into, rows_MB, *sizes) for into, rows_MB in zip(received, rows, strict=True))
        watched(self.guard, dist.all_to_all_single, *moves, group=self.group)
        return [t for into, part in zip(received, parts, strict=True) for t in unpack(into, part)]

    def _rows(self, rows: int, like: Sequence[Tensor]) -> Tensor:
        """Memory for packed rows, [rows, B]; of its own also for none: `combine_parts` tells parts apart by it."""
        if like[0].device.type != "cpu":
            return empty_rows(rows, like)
        # By powers of two calls with other numbers of rows share it; pages that are not written take no room.
        width = row_bytes(like)
        size = rows * width
        return self._pool.empty(1 << max(size - 1, 0).bit_length(), dtype=torch.uint8)[:size].view(rows, width)
