"""Doorbells between processes: each ring lets one waiter on, and a dead process leaves none locked."""

from __future__ import annotations

import os
import signal
import time

from trimtab.dispatch.doorbells import Doorbells
from trimtab.guard.record import map_range, reserve


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
