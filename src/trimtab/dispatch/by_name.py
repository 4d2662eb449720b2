"""The transports by name."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.dispatch.allgather import AllGather
from trimtab.dispatch.alltoall import AllToAll
from trimtab.dispatch.auto import Auto
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Transport

TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "alltoall": AllToAll,
    "allgather": AllGather,
    "shared_memory": SharedMemory,
    "auto": Auto,
}
"""Each is called with a process group, and guard= if another one than by default."""
