"""Doorbells between processes: each ring lets one waiter on, and a dead process leaves none locked."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest

from trimtab.guard.doorbell import STRIDE, Doorbells
from trimtab.guard.memory import SIZE, map_range, open_readonly, reserve


def made() -> Doorbells:
    memory = map_range(reserve("test-bells", SIZE), SIZE)
    start = ctypes.addressof(memory)
    bells = Doorbells(memory, [start + STRIDE * i for i in range(2)])
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


def test_reserved_memory_is_not_taken_for_a_record() -> None:
    fd = reserve("test-size", 1 << 40)
    try:
        assert os.fstat(fd).st_blocks == 0, "reserving takes no memory"
        with pytest.raises(OSError, match="does not hold a record"):
            open_readonly(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
