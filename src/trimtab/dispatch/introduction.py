"""Ranks introduce themselves through their group's store before their first exchange: who, where, on which device.

Each builds its end without waiting for the others, and reads what they said when it needs them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_process_group_store

from trimtab.errors import ConfigError, first_line
from trimtab.guard.guard import Guard
from trimtab.guard.peers import Peer
from trimtab.guard.waiting import Waiting, wait_alone


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a rank says of itself.

    device: type of the tensors that it brings. control: a descriptor, or -1. lack: why it can't share memory, if so.
    """

    peer: Peer
    device: str
    control: int = -1
    lack: str = ""


class Introductions:
    """The cards of a group. Every rank of it must make them, in the same order where there are several.

    Args:
        what: names their kind in the store.
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        global_rank = dist.get_process_group_ranks(group)[self.rank]
        self._me = Peer.me(self.rank, global_rank, -1)  # now: shared memory may take the last descriptor
        store = _get_process_group_store(group)
        self._store = PrefixStore(f"trimtab/{what}/{store.add(f'trimtab/{what}/{self.rank}', 1)}", store)
        self._keys = [f"rank/{rank}" for rank in range(self.size)]
        self._failure = ""

    def say(self, device: str, fd: int = -1, control: int = -1, lack: str = "") -> None:
        """Put this rank's card down. fd: of the memory that it shares, or -1."""
        card = Card(peer=replace(self._me, fd=fd), device=device, control=control, lack=lack)
        self._store.set(self._keys[self.rank], json.dumps(asdict(card)))

    def read(self) -> list[Card]:
        """All cards, by rank, once they are there."""
        told = [json.loads(self._store.get(key)) for key in self._keys]
        return [Card(**{**one, "peer": Peer(**one["peer"])}) for one in told]

    def wait(self, timeout: timedelta) -> None:
        """As `torch.distributed.Work.wait`: until all cards are there."""
        end, pause = time.monotonic() + timeout.total_seconds(), 1e-3
        while not self.is_completed():
            if time.monotonic() > end:
                raise RuntimeError("not all ranks have come to their first exchange")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        if self._failure:
            raise RuntimeError(self._failure)

    def is_completed(self) -> bool:
        """Whether all cards are there, or never will be: the store has failed."""
        try:
            return bool(self._store.check(self._keys))
        except RuntimeError as error:
            self._failure = first_line(error)
            return True


def wait_for(work: Waiting, guard: Guard | None, timeout: float) -> None:
    """Wait with the guard, or without one until `timeout` seconds have passed. Raises what `Guard.wait` does."""
    if guard is not None and guard.gloo:
        guard.wait(work)
    else:
        wait_alone(work, timeout)


def why_not_shared(cards: Sequence[Card]) -> str:
    """Why these ranks can't exchange rows through memory; empty if they can. The same on every rank."""
    devices = {card.device for card in cards}
    if devices != {"cpu"}:
        return f"the tensors are on {', '.join(sorted(devices))}, and only those of the CPU can be shared"
    places: dict[str, list[Card]] = {}
    for card in cards:
        places.setdefault(card.peer.here, []).append(card)
    if len(places) > 1:
        groups = (f"{c[0].peer.host}: ranks {', '.join(str(card.peer.rank) for card in c)}" for c in places.values())
        return f"the ranks are on {len(places)} hosts or in as many containers ({'; '.join(groups)})"
    return "; ".join(card.lack for card in cards if card.lack)


def refuse_unshared(cards: Sequence[Card]) -> None:
    """Raise ConfigError, on every rank, if these ranks can't exchange rows through memory."""
    if reason := why_not_shared(cards):
        raise ConfigError(f"shared memory can't carry the rows: {reason}. Use the transport alltoall", phase="count")
