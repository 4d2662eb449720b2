"""Slots of shared memory that tensors use in turn: never two at once, and no more than were in use at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.host_memory import SMALLEST, HostMemory


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield HostMemory(dist.group.WORLD)
    dist.destroy_process_group()


def address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def test_a_slot_is_taken_again_only_when_the_last_view_of_it_is_gone(memory: HostMemory) -> None:
    first = memory.take(100)
    rows = first.bytes(100)
    view = rows[8:24].view(torch.float32).view(2, 2).data
    del rows
    assert memory.take(100) is not first, "a view is left"
    held = torch.ones(2, 2, requires_grad=True) * view
    del view
    assert memory.take(100) is not first, "autograd has saved it"
    held.sum().backward()
    del held
    assert memory.take(100) is first
    kept = first.bytes(100).untyped_storage()
    assert memory.take(100) is not first, "its storage is held without a tensor"
    del kept
    assert [memory.take(100).number for _ in range(3)] == [0, 0, 0]


def test_the_smallest_that_is_large_enough_is_taken_and_the_largest_grows(memory: HostMemory) -> None:
    sizes = [SMALLEST, 4 * SMALLEST, 2 * SMALLEST]
    slots, held = [], []
    for size in sizes:
        slots.append(memory.take(size))
        held.append(slots[-1].bytes(size))
    assert [slot.size for slot in slots] == sizes
    held.clear()
    assert memory.take(2 * SMALLEST) is slots[2]
    assert memory.take(0) is slots[0]
    assert memory.take(0, besides=slots[0]) is slots[2]
    grown = memory.take(5 * SMALLEST)
    assert grown is slots[1]
    assert grown.bytes(5 * SMALLEST).shape == (5 * SMALLEST,)
    assert grown.size == 8 * SMALLEST


def test_what_evaluation_has_used_training_uses_again(memory: HostMemory) -> None:
    with torch.inference_mode():
        memory.take(16).bytes(16).fill_(1)
    again = memory.take(16).bytes(16).view(torch.float32)
    assert not again.is_inference()
    weight = torch.ones(4, requires_grad=True)
    (weight * again.data).sum().backward()
    assert weight.grad is not None
