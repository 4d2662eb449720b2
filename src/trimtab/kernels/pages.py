"""Memory that is handed out again: fresh pages cost more to touch than most kernels cost to run.

The system zeroes a page when it is first touched, at a fraction of the speed of memory, and large blocks go back to it
when they are freed. `Pages` keeps what its tensors leave and hands it to the next that asks for as many bytes.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from weakref import WeakValueDictionary

import torch
from torch import Tensor

SMALL = 1 << 18  # bytes; below it, the allocator's own reuse is good enough
HUGE = 1 << 21
SLACK = 1.5


class Pages:
    """Tensors on the CPU from pages that earlier tensors of this object left.

    What lies idle and what is in use are together at most half as much again as was once in use at the same time: a
    forward and a backward take different sizes in turn. A tensor's memory comes back when nothing refers to it any
    more; threads may share an object.
    """

    def __init__(self) -> None:
        self.used = self.most = self.idle = 0
        self._free: deque[mmap.mmap] = deque()  # the oldest first
        self._lock = threading.RLock()  # a finalizer may run while this thread is inside

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of this shape. Not initialised, but NaN under deterministic algorithms, as torch's."""
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL:
            return torch.empty(shape, dtype=dtype, device="cpu")
        pages = self._take(_rounded(size))
        block = (ctypes.c_char * len(pages)).from_buffer(pages)
        weakref.finalize(block, self._give, pages).atexit = False
        flat = torch.frombuffer(block, dtype=dtype, count=math.prod(shape))
        values = torch.empty(0, dtype=dtype, device="cpu")
        values.set_(flat.untyped_storage(), 0, shape, torch.empty(shape, device="meta").stride())  # no view of another
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            values.fill_(math.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
        return values

    def empty_like(self, like: Tensor) -> Tensor:
        """The same for a tensor like another on the CPU."""
        if not like.is_contiguous() or like.device.type != "cpu":
            return torch.empty_like(like)
        return self.empty(*like.shape, dtype=like.dtype)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            self.used += size
            self.most = max(self.most, self.used)
            for i in range(len(self._free) - 1, -1, -1):
                if len(self._free[i]) == size:
                    pages = self._free[i]
                    del self._free[i]
                    self.idle -= size
                    return pages
            self._trim()
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE:
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def _give(self, pages: mmap.mmap) -> None:
        with self._lock:
            self.used -= len(pages)
            self.idle += len(pages)
            self._free.append(pages)
            self._trim()

    def _trim(self) -> None:
        while self.idle + self.used > self.most * SLACK and self._free:
            self.idle -= len(self._free.popleft())


def _rounded(size: int) -> int:
    """Up by an eighth at most, so that numbers of rows that differ a little share pages."""
    step = max(mmap.PAGESIZE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step


_shared: WeakValueDictionary[str, Pages] = WeakValueDictionary()
"""Holds nothing: kernels share one object for as long as one of them lives, so that layers reuse each other's pages."""


def shared_pages() -> Pages:
    """The pages that all kernels of this process share."""
    pages = _shared.get("cpu")
    if pages is None:
        pages = _shared.setdefault("cpu", Pages())
    return pages
