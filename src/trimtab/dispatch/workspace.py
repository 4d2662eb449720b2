"""Memory on the CPU that tensors use in turn: fresh pages cost more than the copy into them.

slot = workspace.take(size)          one that no tensor uses
rows = slot.bytes(size)              it is in use for as long as `rows` or a view of it lives
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST = 1 << 16


def private(number: int, size: int) -> Tensor:
    """Memory of this process: [size] uint8."""
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class Slot:
    """One piece of memory. It grows to powers of two; of those, pages that were never written take no room.

    number: counts a workspace's slots.
    """

    def __init__(self, number: int, make: Callable[[int, int], Tensor]) -> None:
        self.number = number
        self._make = make
        self._renew(SMALLEST)

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return self._all.shape[0]

    @property
    def free(self) -> bool:
        """Whether no tensor but its own is on its memory. Tensors may be held by autograd alone, or by C++."""
        return self._users() == self._alone

    def bytes(self, size: int) -> Tensor:
        """Its first bytes, [size] uint8. What they held is lost if it has to grow."""
        if size > self.size:
            self._renew(1 << (size - 1).bit_length())
        return self._all[:size]

    def _renew(self, size: int) -> None:
        with torch.inference_mode(False):  # what evaluation has used, training uses again
            self._all = self._make(self.number, size)
        self._storage = self._all.untyped_storage()
        self._alone = self._users()

    def _users(self) -> tuple[int, int]:
        """Of the storage: what holds it in C++ (no public function says this), and what holds its one object in Python,
        which a program may keep without a tensor."""
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)


class Workspace:
    """The slots of one owner; as many as have been in use at once. They are freed with it and with their tensors.

    make: (number of the slot, bytes) -> [bytes] uint8.
    """

    def __init__(self, make: Callable[[int, int], Tensor] = private) -> None:
        self._make = make
        self.slots: list[Slot] = []

    def take(self, size: int, *, besides: Slot | None = None) -> Slot:
        """A free slot other than `besides`: the smallest that holds `size` bytes, else the largest, which will grow."""
        free = [slot for slot in self.slots if slot is not besides and slot.free]
        enough = [slot for slot in free if slot.size >= size]
        if enough:
            return min(enough, key=lambda slot: slot.size)
        if free:
            return max(free, key=lambda slot: slot.size)
        self.slots.append(Slot(len(self.slots), self._make))
        return self.slots[-1]
