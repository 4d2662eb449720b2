"""What the layers of one `parallelize` call share for each process group: a transport, a guard."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from trimtab.dispatch.transport import Transport
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.guard.guard import Guard


@dataclass(frozen=True)
class Wiring:
    """Made when they are first asked for: all ranks of a group must ask in the same order. No communication."""

    transports: dict[tuple[str, dist.ProcessGroup], Transport] = field(default_factory=dict)
    guards: dict[dist.ProcessGroup, Guard] = field(default_factory=dict)

    def transport(self, kind: str, group: dist.ProcessGroup) -> Transport | None:
        """None for a group of one rank, which needs none."""
        if dist.get_world_size(group) == 1:
            return None
        if (kind, group) not in self.transports:
            self.transports[kind, group] = TRANSPORTS[kind](group)
        return self.transports[kind, group]

    def guard(self, group: dist.ProcessGroup) -> Guard:
        """Of exchanges that go through no transport."""
        if group not in self.guards:
            self.guards[group] = Guard().join(group)
        return self.guards[group]
