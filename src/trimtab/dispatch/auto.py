"""The transport that suits the ranks: shared memory on one host without a GPU, else all-to-all.

Decided by all ranks alike at their first exchange, from what each says of its host and of its tensors' device, and
then of whether it could open the others' memory.

Legend: T local tokens, P ranks, C columns of the header, M rows sent, M' rows received.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.alltoall import AllToAll
from trimtab.dispatch.introduction import Introductions, wait_for, why_not_shared
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Headers, Lanes, OverGroup, Transport
from trimtab.errors import BackendError
from trimtab.guard.group import timeout_of
from trimtab.guard.guard import Guard


class Auto(OverGroup):
    """`SharedMemory` where the ranks can use it, else `AllToAll`; the same one on every rank.

    chosen: which, from the first exchange on. why: why not shared memory; empty if it is that. `group` and `guard` as
    for `AllToAll`.
    """

    def __init__(self, group: dist.ProcessGroup, *, guard: Guard | bool = True) -> None:
        super().__init__(group, guard=guard)
        self.chosen: Transport | None = None
        self.why = ""
        self._introductions = Introductions(group, "auto")

    def exchange_headers(self, headers_PC: Tensor) -> Headers:
        return self._choice(headers_PC.device).exchange_headers(headers_PC)

    def spread(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, lanes: Lanes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        return self._choice(row_token_M.device).spread(tensors, row_token_M, lanes, tokens)

    def move(self, tensors: Sequence[Tensor], lanes: Lanes, tokens: tuple[int, ...]) -> list[Tensor]:
        return self._choice(tensors[0].device).move(tensors, lanes, tokens)

    def _choice(self, device: torch.device) -> Transport:
        if self.chosen is None:
            guard = False if self.guard is None else self.guard
            shared, lack = None, ""
            try:
                shared = SharedMemory(self.group, guard=guard)
            except BackendError as error:
                lack = error.message
            self._introductions.say(device.type, lack=lack)
            wait_for(self._introductions, self.guard, timeout_of(self.group))
            self.why = why_not_shared(self._introductions.read())
            if not self.why and shared is not None:
                try:
                    shared.meet_peers(device)
                except BackendError as error:  # the same on every rank
                    self.why = error.message
            self.chosen = AllToAll(self.group, guard=guard) if self.why or shared is None else shared
        return self.chosen
