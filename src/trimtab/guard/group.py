"""What the guard must know of a process group that torch.distributed has no public name for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.constants import default_pg_timeout


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the host waits for this group's collectives on CPU tensors through Gloo."""
    try:
        return str(group._get_backend(torch.device("cpu")).name()).lower() == "gloo"
    except RuntimeError:
        return False


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which this group's own collectives on CPU tensors give up."""
    if not has_gloo(group):
        return default_pg_timeout.total_seconds()
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def store_host(store: Any, world: Sequence[int]) -> int | None:
    """The rank of the group whose process serves the store, if one does: not a file, nor torchrun's agent."""
    served = isinstance(store._underlying_non_prefix_store, TCPStore)
    if not served or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or 0 not in world:
        return None
    return list(world).index(0)


def outlive(left: object) -> None:
    """Leave a group, or a collective of one, behind for good.

    A Gloo group that is destroyed waits for the collectives in flight, up to its own timeout, and it has no abort. A
    process that has found out that they will never end must be able to end itself. And who is the last to hold a
    collective frees its tensors, for which it needs Python: a thread of Gloo's that does so while the interpreter ends
    aborts the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
