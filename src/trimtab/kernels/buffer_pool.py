"""Host memory that is used again: the first touch of fresh memory costs more than most kernels cost to run."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trimtab.autograd import not_in_graphs

SMALL = 1 << 18
"""Bytes below which the allocator's own reuse is good enough."""
HUGE = 1 << 21
SLACK = 1.5
"""Bytes in use and idle together, of the most that were in use at once: forward and backward take sizes in turn."""


class HostBufferPool:
    """CPU tensors in memory that earlier tensors of the pool have left. Threads may share a pool.

    Memory comes back when nothing refers to its tensor any more. What then runs may do so between any two steps of a
    thread, also inside this class: it takes no lock, but appends to `_news`, which the next caller counts.

    used, idle, most: bytes in use, bytes that wait, and the most that were in use at once, at the last call.
    """

    def __init__(self) -> None:
        self.used = self.idle = self.most = 0
        self._free: deque[mmap.mmap] = deque()  # the oldest first
        self._out: dict[int, tuple[weakref.ref[memoryview], mmap.mmap]] = {}
        self._news: deque[mmap.mmap | int] = deque()  # buffers that came back, bytes that were taken
        self._lock, self._inside = threading.RLock(), False

    @not_in_graphs  # in a frame of ours, where one around it has left the graph
    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of this shape. Not initialized, but NaN under deterministic algorithms, as torch's."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < SMALL:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # Not a view of another, and the result of an operator: what counts memory by operators sees it.
        values = torch.frombuffer(self._lend(rounded(size)), dtype=dtype, count=count).resize_(shape)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            values.fill_(math.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
        return values

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The same for a tensor like another on the CPU; contiguous, if that is one value in every place."""
        if like.device.type != "cpu" or not (like.is_contiguous() or not any(like.stride())):
            return torch.empty_like(like, dtype=dtype)
        return self.empty(*like.shape, dtype=dtype or like.dtype)

    def count(self) -> None:
        """Bring `used`, `idle` and `most` up to date."""
        self._enter(0)

    def _lend(self, size: int) -> memoryview:
        """Memory that comes back with the last reference to this view of it."""
        self._news.append(size)
        buffer = self._enter(size)
        if buffer is None:
            buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE:
                buffer.madvise(mmap.MADV_HUGEPAGE)
        lent = memoryview(buffer)
        ref = weakref.ref(lent, self._came_back)
        self._out[id(ref)] = ref, buffer
        return lent

    def _came_back(self, ref: weakref.ref[memoryview]) -> None:
        self._news.append(self._out.pop(id(ref))[1])

    def _enter(self, size: int) -> mmap.mmap | None:
        """An idle buffer of this size. None if there is none, or where a finalizer takes memory inside a call."""
        with self._lock:
            if self._inside:
                return None
            self._inside = True
            try:
                self._count_news()
                found = None
                for at in reversed(range(len(self._free))):
                    if len(self._free[at]) == size:
                        found = self._free[at]
                        del self._free[at]
                        self.idle -= size
                        break
                while self.idle + self.used > self.most * SLACK and self._free:
                    self.idle -= len(self._free.popleft())
                return found
            finally:
                self._inside = False

    def _count_news(self) -> None:
        while self._news:
            new = self._news.popleft()
            if isinstance(new, int):
                self.used += new
                self.most = max(self.most, self.used)
            else:
                self.used -= len(new)
                self.idle += len(new)
                self._free.append(new)


def rounded(size: int) -> int:
    """Up by an eighth at most, so that numbers of rows that differ a little share buffers."""
    step = max(mmap.PAGESIZE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step


_shared: WeakValueDictionary[str, HostBufferPool] = WeakValueDictionary()


def shared_pool() -> HostBufferPool:
    """The pool that all backends of this process share, for as long as one of them lives."""
    return _shared.get("cpu") or _shared.setdefault("cpu", HostBufferPool())
