"""One thread of a rank at a time exchanges over a process group, whatever the guards and transports that it has."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch.distributed as dist


class ExchangeLock:
    """One thread of a rank at a time is in an exchange of a process group; it may enter again what it is in. `holder`:
    the name of the thread that has it, or had it last."""

    def __init__(self) -> None:
        self._lock, self.holder = threading.RLock(), "another"

    def acquire(self) -> bool:
        """Take it for this thread; False where another has it. Never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        self.holder = threading.current_thread().name
        return True

    def release(self) -> None:
        self._lock.release()


_LOCKS: WeakKeyDictionary[dist.ProcessGroup, ExchangeLock] = WeakKeyDictionary()


def exchange_lock(group: dist.ProcessGroup) -> ExchangeLock:
    """The one of `group`: its guards know nothing of each other, and share it."""
    return _LOCKS.setdefault(group, ExchangeLock())
