"""Whose turn it is: one thread of a rank at a time is in an exchange of a process group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist


class Turn:
    """Of one group on this rank. A thread may enter again what it is in."""

    def __init__(self) -> None:
        self._lock, self._thread = threading.RLock(), ""

    @contextmanager
    def taken(self) -> Iterator[str | None]:
        """Gives None, or which other thread has it: then it is not taken, and nothing may be exchanged."""
        if not self._lock.acquire(blocking=False):
            yield self._thread or "another"
            return
        self._thread = threading.current_thread().name
        try:
            yield None
        finally:
            self._lock.release()


_turns: WeakKeyDictionary[dist.ProcessGroup, Turn] = WeakKeyDictionary()
"""Guards of one group know nothing of each other, and share it. Lives as long as the groups do."""


def turn_of(group: dist.ProcessGroup) -> Turn:
    """The one of `group`."""
    return _turns.setdefault(group, Turn())
