"""trimtab: Mixture-of-Experts for PyTorch with the right numbers, however the tokens fall.

Names are imported when they are first used, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.dispatch.allgather import AllGather as AllGather
    from trimtab.dispatch.alltoall import AllToAll as AllToAll
    from trimtab.dispatch.dispatcher import Dispatcher as Dispatcher
    from trimtab.dispatch.dispatcher import Rows as Rows
    from trimtab.experts.linear import GroupedLinear as GroupedLinear
    from trimtab.experts.module import ExpertMLP as ExpertMLP

__version__ = "0.1.0"

_HOMES = {
    "AllGather": "trimtab.dispatch.allgather",
    "AllToAll": "trimtab.dispatch.alltoall",
    "Dispatcher": "trimtab.dispatch.dispatcher",
    "ExpertMLP": "trimtab.experts.module",
    "GroupedLinear": "trimtab.experts.linear",
    "Rows": "trimtab.dispatch.dispatcher",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
