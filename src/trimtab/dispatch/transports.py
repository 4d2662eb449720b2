"""The transport that suits the ranks: shared memory on one host without a GPU, else all-to-all.

Decided by all ranks alike at their first exchange, from what each says of its host and of its tensors' device, and
then of whether it could open the others' memory.

Legend: T local tokens, P ranks, C columns of the message, M rows sent, M' rows received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.over_group import OverGroup
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Handshake, SplitSizes, Transport
from trimtab.errors import BackendError, ConfigError
from trimtab.guard.guard import Guard


class Auto(OverGroup):
    """`SharedMemory` where the ranks can use it, else `AllToAll`; the same one on every rank.

    chosen: which, from the first exchange on. why: why not shared memory; empty if it is that.

    Args:
        group, guard: as in `AllToAll`.
    """

    def __init__(self, group: dist.ProcessGroup, *, guard: Guard | bool = True) -> None:
        super().__init__(group, guard=guard)
        self.chosen: Transport | None = None
        self.why = ""

    def handshake(self, message_PC: Tensor) -> Handshake:
        return self._choice(message_PC.device).handshake(message_PC)

    def dispatch(
        self, tensors: Sequence[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        return self._choice(row_token_M.device).dispatch(tensors, row_token_M, splits, tokens)

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        return self._choice(tensors[0].device).combine(tensors, splits, tokens)

    def _choice(self, device: torch.device) -> Transport:
        if self.chosen is None:
            guard = False if self.guard is None else self.guard
            shared = SharedMemory(self.group, guard=guard, agree=True)
            try:
                shared.meet_peers(device)
                self.chosen = shared
            except (BackendError, ConfigError) as error:  # the same on every rank
                self.chosen, self.why = AllToAll(self.group, guard=guard), error.message
        return self.chosen


TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "alltoall": AllToAll,
    "allgather": AllGather,
    "shared_memory": SharedMemory,
    "auto": Auto,
}
"""Each is called with a process group, and guard= if another one than by default. A row here is all that a new one
takes: names are compared with this, and tests and topologies go through it."""
_MADE: dict[int, dict[str, Any]] = {}


def transport_over(ranks: DeviceMesh | dist.ProcessGroup, name: str) -> Transport:
    """One, and so one guard, for all layers that are given this very object, and gone with it: so ranks share alike,
    whenever each of them collects what it no longer uses. Every rank must call."""
    if id(ranks) not in _MADE:
        _MADE[id(ranks)] = {}
        finalize(ranks, _MADE.pop, id(ranks))
    made = _MADE[id(ranks)]
    if name not in made:
        guard = next((other.guard for other in made.values() if other.guard is not None), True)
        made[name] = TRANSPORTS[name](getattr(ranks, "get_group", lambda: ranks)(), guard=guard)
    return made[name]  # type: ignore[no-any-return]
