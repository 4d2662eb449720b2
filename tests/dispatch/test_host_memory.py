"""Slots of shared memory that tensors use in turn: never two at once, and no more than were in use at once. Doorbells
between processes: each ring lets one waiter on, and a dead process leaves none locked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from trimtab.dispatch.doorbells import Doorbells
from trimtab.dispatch.host_memory import SMALLEST, HostMemory
from trimtab.guard.record import map_range, reserve


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield HostMemory(dist.group.WORLD)
    dist.destroy_process_group()


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


def made() -> Doorbells:
    bells = Doorbells(map_range(reserve("test-bells", 4096), 4096), 2)
    bells.begin()
    return bells


def test_rings_are_counted_and_a_wait_ends_in_time() -> None:
    bells = made()
    assert not bells.rung(0)
    bells.ring(0)
    bells.ring(0)
    assert not bells.rung(1)
    assert bells.rung(0)
    assert bells.wait(0, 0.0)
    assert not bells.rung(0)
    start = time.monotonic()
    assert not bells.wait(0, 0.05)
    assert 0.045 <= time.monotonic() - start < 5


def test_another_process_rings_and_may_die_at_it() -> None:
    bells = made()
    child = os.fork()
    if child == 0:  # nothing of torch or pytest may run here
        bells.wait(0, 30.0)
        bells.ring(1)
        signal.pause()
        os._exit(0)
    try:
        assert not bells.wait(1, 0.05)
        bells.ring(0)
        assert bells.wait(1, 30.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    bells.ring(1)
    assert bells.wait(1, 1.0)


def test_a_signal_does_not_end_a_wait() -> None:
    bells = made()
    caught: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert not bells.wait(0, 0.1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught == [1]
