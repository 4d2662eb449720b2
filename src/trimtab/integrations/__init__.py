"""Where trimtab plugs into other frameworks. Each folder imports its framework, and nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import finalize

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from trimtab.dispatch.transport import Transport

_MADE: dict[int, dict[str, Any]] = {}


def transport_over(ranks: DeviceMesh | ProcessGroup, name: str) -> Transport:
    """One, and so one guard, for all layers that are given this very object, and gone with it: so ranks share alike,
    whenever each of them collects what it no longer uses. Every rank must call."""
    from trimtab.dispatch.transports import TRANSPORTS

    if id(ranks) not in _MADE:
        _MADE[id(ranks)] = {}
        finalize(ranks, _MADE.pop, id(ranks))
    made = _MADE[id(ranks)]
    if name not in made:
        guard = next((other.guard for other in made.values() if other.guard is not None), True)
        made[name] = TRANSPORTS[name](getattr(ranks, "get_group", lambda: ranks)(), guard=guard)
    return made[name]  # type: ignore[no-any-return]
