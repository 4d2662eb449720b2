"""Doorbells between the processes of one host: a counter in shared memory that one rings and another waits at.

POSIX semaphores: to ring and to have waited orders memory between the two processes on every architecture, a waiting
process sleeps in the kernel (ranks may outnumber the cores), and one that dies leaves nothing locked.
"""

from __future__ import annotations

import ctypes
import errno
import time
from typing import Any

STRIDE = 64
"""Bytes from one doorbell to the next: a cache line. `sem_t` takes 32 at most."""
_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Doorbells:
    """The doorbells at these addresses. `memory` is what they lie in; it is kept."""

    def __init__(self, memory: Any, addresses: list[int]) -> None:
        self._memory, self._addresses = memory, addresses
        libc = ctypes.CDLL(None, use_errno=True)
        self._post, self._try = libc.sem_post, libc.sem_trywait
        self._post.argtypes = self._try.argtypes = (ctypes.c_void_p,)
        # The monotonic clock where the C library waits by it: no step of the wall clock makes a wait longer.
        self._monotonic = hasattr(libc, "sem_clockwait")
        if self._monotonic:
            self._wait = libc.sem_clockwait
            self._wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        else:
            self._wait = libc.sem_timedwait
            self._wait.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

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
        until = _Timespec(int(end), int(end % 1 * 1e9))
        address, pointer = self._addresses[which], ctypes.byref(until)
        while (self._wait(address, _MONOTONIC, pointer) if self._monotonic else self._wait(address, pointer)) != 0:
            if ctypes.get_errno() != errno.EINTR:
                return False
        return True
