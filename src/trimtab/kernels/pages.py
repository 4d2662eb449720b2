"""Memory that is handed out again: fresh pages cost more to touch than most kernels cost to run.

The system zeroes a page when it is first touched, at a fraction of the speed of memory, and large blocks go back to it
when they are freed. `Pages` keeps what its tensors leave and hands it to the next that asks for as many bytes.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from typing import cast
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

    A finalizer may run between any two steps of a thread, also of one that is inside here. So it takes no lock: it
    adds to the news, as whoever comes in through one does; news are counted by the next to come in.
    """

    def __init__(self) -> None:
        self._used = self._most = self._idle = 0
        self._free: deque[mmap.mmap] = deque()  # the oldest first
        self._news: deque[mmap.mmap | int] = deque()  # pages that came back, bytes that were taken
        self._lock, self._inside = threading.RLock(), False

    @property
    def used(self) -> int:
        """Bytes in use."""
        self._enter()
        return self._used

    @property
    def idle(self) -> int:
        """Bytes that lie ready."""
        self._enter()
        return self._idle

    @property
    def most(self) -> int:
        """Bytes that were once in use at the same time."""
        self._enter()
        return self._most

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of this shape. Not initialised, but NaN under deterministic algorithms, as torch's."""
        if torch.compiler.is_compiling():  # in a frame of ours, where one around it has left the graph
            from trimtab.eager import eagerly

            return cast(Tensor, eagerly(self.empty, *shape, dtype=dtype))
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < SMALL:
            return torch.empty(shape, dtype=dtype, device="cpu")
        pages = self._take(_rounded(size))
        block = memoryview(pages)
        weakref.finalize(block, self._give, pages).atexit = False
        flat = torch.frombuffer(block, dtype=dtype, count=count)
        values = torch.empty(0, dtype=dtype, device="cpu")
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        # No view of another; and as the result of an operator, so that what counts memory by operators sees it.
        values.set_(flat.untyped_storage(), 0, shape, strides)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            values.fill_(math.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
        return values

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The same for a tensor like another on the CPU."""
        if not like.is_contiguous() or like.device.type != "cpu":
            return torch.empty_like(like, dtype=dtype)
        return self.empty(*like.shape, dtype=dtype or like.dtype)

    def _take(self, size: int) -> mmap.mmap:
        self._news.append(size)
        pages = self._enter(size)
        if pages is None:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE:
                pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def _give(self, pages: mmap.mmap) -> None:
        self._news.append(pages)

    def _enter(self, size: int = 0) -> mmap.mmap | None:
        """Count the news; pages of this size, if some lie idle. Nothing of both where this thread is inside already."""
        with self._lock:
            if self._inside:
                return None
            self._inside = True
            try:
                self._count()
                pages = self._find(size)
                while self._idle + self._used > self._most * SLACK and self._free:
                    self._idle -= len(self._free.popleft())
                return pages
            finally:
                self._inside = False

    def _count(self) -> None:
        while self._news:
            new = self._news.popleft()
            if isinstance(new, int):
                self._used += new
                self._most = max(self._most, self._used)
            else:
                self._used -= len(new)
                self._idle += len(new)
                self._free.append(new)

    def _find(self, size: int) -> mmap.mmap | None:
        for i in range(len(self._free) - 1, -1, -1):
            if len(self._free[i]) == size:
                pages = self._free[i]
                del self._free[i]
                self._idle -= size
                return pages
        return None


def _rounded(size: int) -> int:
    """Up by an eighth at most, so that numbers of rows that differ a little share pages."""
    step = max(mmap.PAGESIZE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step


_shared: WeakValueDictionary[str, Pages] = WeakValueDictionary()
"""Holds nothing: kernels share one object for as long as one of them lives, so that layers reuse each other's pages.

Layers are built one by one, each with kernels of its own, and nothing is handed from one to the next: what they share
can only be found by all of them here. Pages apart for each layer would multiply the idle memory by their number.
"""


def shared_pages() -> Pages:
    """The pages that all kernels of this process share."""
    pages = _shared.get("cpu")
    if pages is None:
        pages = _shared.setdefault("cpu", Pages())
    return pages
