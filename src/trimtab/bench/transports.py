"""Transports by name, as far as this installation has them."""

from __future__ import annotations

import importlib
import importlib.util

import torch.distributed as dist

from trimtab.dispatch.transport import Transport
from trimtab.errors import BackendError, ConfigError

TRANSPORTS = {
    "alltoall": ("trimtab.dispatch.alltoall", "AllToAll"),
    "allgather": ("trimtab.dispatch.allgather", "AllGather"),
    "shared_memory": ("trimtab.dispatch.shared_memory", "SharedMemory"),
    "auto": ("trimtab.dispatch.auto", "Auto"),
}


def present() -> list[str]:
    """The names of those that can be imported here."""
    return [name for name, (module, _) in TRANSPORTS.items() if importlib.util.find_spec(module) is not None]


def direct() -> list[str]:
    """Those of them that send a row only where it is needed, each by its own name."""
    return [name for name in present() if name not in ("allgather", "auto")]


def make_transport(name: str, group: dist.ProcessGroup) -> Transport:
    """A transport over `group`, guarded as it is by default. Collective where it is.

    Raises ConfigError for a name that is none, BackendError for one that is not here.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"transport {name!r} is not one of {', '.join(TRANSPORTS)}")
    module, attribute = TRANSPORTS[name]
    if name not in present():
        raise BackendError(f"transport {name!r} is not in this installation")
    made: Transport = getattr(importlib.import_module(module), attribute)(group)
    return made
