"""Doorbells between ranks of one host: a counter for each pair, which one rings and the other waits at."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from trimtab.guard.peers import PeerInfo

STRIDE = 64
"""Bytes from one doorbell to the next: a cache line. `sem_t` takes 32 at most."""


class Arrivals:
    """Waits until every peer has rung. Ends with an error when one cannot any more, for its process is gone.

    first: number of the doorbell that peer 0 rings; the others' follow. spin: seconds of looking before sleeping.
    """

    def __init__(self, peers: Mapping[int, PeerInfo], bells: Doorbells, first: int, spin: float) -> None:
        self.missing = dict(peers)
        self._bells, self._first, self._spin = bells, first, spin
        self.gone: tuple[int, ...] = ()

    def wait(self, timeout: timedelta) -> None:
        now = time.monotonic()
        end, spin = now + timeout.total_seconds(), now + self._spin
        while self.missing and time.monotonic() < spin:
            self._look()
        self._spin = 0.0
        while self.missing:
            rank = next(iter(self.missing))
            if self._bells.wait(self._first + rank, max(0.0, end - time.monotonic())):
                del self.missing[rank]
            else:
                self._raise_if_missing()

    def is_completed(self) -> bool:
        return not self.missing or bool(self.gone)

    def _look(self) -> None:
        for rank in [rank for rank in self.missing if self._bells.rung(self._first + rank)]:
            del self.missing[rank]

    def _raise_if_missing(self) -> None:
        gone = [rank for rank, peer in self.missing.items() if peer.state() == "gone"]
        self._look()  # it may have rung before it ended
        self.gone = tuple(rank for rank in gone if rank in self.missing)
        if self.gone:
            raise RuntimeError(f"the process of {', '.join(f'rank {rank}' for rank in self.gone)} has ended")
        if self.missing:
            raise RuntimeError(f"ranks {', '.join(map(str, self.missing))} have not come")


class Doorbells:
    """Counters in shared memory that one process rings and another waits at.

    POSIX semaphores: they order memory between the processes on every architecture, who waits sleeps in the kernel, and
    a process that dies leaves nothing locked. memory: a buffer that begins with `number` of them, `STRIDE` bytes apart.
    """

    def __init__(self, memory: Any, number: int) -> None:
        self._memory = memory
        start = ctypes.addressof(memory)
        self._addresses = [start + STRIDE * i for i in range(number)]
        libc = ctypes.CDLL(None, use_errno=True)
        self._post, self._try = libc.sem_post, libc.sem_trywait
        self._post.argtypes = self._try.argtypes = (ctypes.c_void_p,)
        # The monotonic clock where the C library waits by it: no step of the wall clock makes a wait longer.
        self._monotonic = hasattr(libc, "sem_clockwait")
        self._clock = (time.CLOCK_MONOTONIC,) if self._monotonic else ()
        self._wait = libc.sem_clockwait if self._monotonic else libc.sem_timedwait
        self._wait.argtypes = (ctypes.c_void_p, *[ctypes.c_int] * len(self._clock), ctypes.c_void_p)

    def begin(self) -> None:
        """Set them up: once, by one process, before anybody rings."""
        init = ctypes.CDLL(None).sem_init
        init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        for address in self._addresses:
            init(address, 1, 0)

    def ring(self, which: int) -> None:
        """Let the one who waits there go on, now or when he comes. About half a microsecond."""
        self._post(self._addresses[which])

    def rung(self, which: int) -> bool:
        """Take one ring, if there is one."""
        return bool(self._try(self._addresses[which]) == 0)

    def wait(self, which: int, seconds: float) -> bool:
        """Take one ring; whether there was one within so many seconds."""
        end = (time.monotonic() if self._monotonic else time.time()) + seconds
        until = (ctypes.c_long * 2)(int(end), int(end % 1 * 1e9))
        while self._wait(self._addresses[which], *self._clock, ctypes.byref(until)) != 0:
            if ctypes.get_errno() != errno.EINTR:
                return False
        return True
