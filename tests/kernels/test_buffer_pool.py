"""Buffers are handed out again, never twice at a time, and little more than was once in use."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from trimtab.dispatch.planned import Pool
from trimtab.kernels import buffer_pool
from trimtab.kernels.buffer_pool import SLACK, HostBufferPool, shared_pool

BIG = 1 << 20


def test_what_is_freed_is_handed_out_again() -> None:
    pool = HostBufferPool()
    a, b = (pool.empty(BIG, dtype=torch.float32) for _ in range(2))
    where = {a.data_ptr(), b.data_ptr()}
    assert len(where) == 2
    part = a[10:20]
    del a
    c = pool.empty(BIG, dtype=torch.float32)
    assert c.data_ptr() not in where  # `part` still holds a's memory
    del part, b
    d, e = (pool.empty(BIG // 2, 2, dtype=torch.float32) for _ in range(2))
    assert {d.data_ptr(), e.data_ptr()} == where
    assert d.untyped_storage().nbytes() == 4 * BIG
    assert not d._is_view()  # autograd may change it in place


def test_memory_without_values_is_lent_and_kept_alike() -> None:
    real, pool, bound = HostBufferPool(), Pool(), Pool(bounds=True)
    rng, held = random.Random(0), deque[list[torch.Tensor]](maxlen=5)
    for _ in range(60):
        shape = rng.randrange(1, 6), rng.randrange(BIG)
        held.append([each.empty(*shape, dtype=torch.bfloat16) for each in (real, pool, bound)])
        for _ in range(rng.randrange(2) * len(held) // 2):
            held.popleft()
        assert (real.used, real.idle, real.most) == (pool.used, pool.idle, pool.most)
    rest = sum(each.untyped_storage().nbytes() for each in bound._rest)
    assert rest == int(real.most * SLACK) - bound.used - bound.idle > 0 < real.idle
    assert {tuple(t.shape) for t in held[-1]} == {shape}


def test_little_more_is_kept_than_was_once_used() -> None:
    pool = HostBufferPool()
    for n in (3, 5, 2, 7, 1, 4):
        a = pool.empty(n * BIG, dtype=torch.float32)
        assert pool.used + pool.idle <= pool.most * SLACK
        del a
        pool.count()
        assert pool.used == 0
        assert pool.idle <= pool.most * SLACK
    assert pool.most < 1.13 * 7 * BIG * 4


def test_threads_may_share_them() -> None:
    pool, bad = HostBufferPool(), []

    def work(number: int) -> None:
        for i in range(200):
            t = pool.empty(1 << 18, dtype=torch.float32)
            t.fill_(number)
            if not bool((t == number).all()):
                bad.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    pool.count()
    assert pool.used == 0


class Restless(deque[Any]):
    """Collects garbage before its step of number `when`."""

    def __init__(self, items: Iterable[Any], when: int) -> None:
        super().__init__(items)
        self.left = when

    def step(self) -> None:
        self.left -= 1
        if self.left == -1:
            gc.collect()

    def __len__(self) -> int:
        self.step()
        return super().__len__()

    def __delitem__(self, at: Any) -> None:
        self.step()
        super().__delitem__(at)

    def append(self, x: Any) -> None:
        self.step()
        super().append(x)


def test_a_finalizer_may_run_at_every_step_and_take_memory_itself() -> None:
    unit, steps = 1 << 17, 0

    class Garbage:
        def __init__(self, pool: HostBufferPool, taken: list[torch.Tensor]) -> None:
            self.pool, self.taken, self.me = pool, taken, self
            self.tensor = pool.empty(unit, dtype=torch.float32)

        def __del__(self) -> None:
            self.taken.append(self.pool.empty(unit, dtype=torch.float32))

    gc.collect()
    gc.freeze()  # what was there before is not looked at again each time
    gc.disable()
    try:
        for when in range(100):
            pool, taken = HostBufferPool(), []
            before = [pool.empty(n * unit, dtype=torch.float32) for n in (1, 2, 1, 3)]
            Garbage(pool, taken)
            before.clear()
            pool._free = Restless(pool._free, when)
            alive = [pool.empty(n * unit, dtype=torch.float32) for n in (3, 1, 2)]
            if not taken:
                break
            steps += 1
            assert [t.untyped_storage().nbytes() // 4 // unit for t in alive + taken] == [3, 1, 2, 1], when
            assert len({t.data_ptr() for t in alive + taken}) == 4, "nobody has what another has"
            pool.count()
            assert pool.used == 7 * unit * 4
            assert pool.used + pool.idle <= pool.most * SLACK
            assert pool.idle == sum(map(len, list(pool._free)))
            alive.clear()
            taken.clear()
            pool.count()
            assert pool.used == 0
    finally:
        gc.enable()
        gc.unfreeze()
    assert steps >= 10


@pytest.mark.usefixtures("poisoned")
def test_they_are_poisoned_where_fresh_memory_is() -> None:
    pool = HostBufferPool()
    for _ in range(2):
        a = pool.empty(BIG, dtype=torch.bfloat16)
        assert a.isnan().all()
        a.zero_()
        del a


def test_they_go_with_the_last_who_shares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "_shared", weakref.WeakValueDictionary())
    first, second = shared_pool(), shared_pool()
    assert first is second
    gone = weakref.ref(first)
    del first, second
    gc.collect()
    assert gone() is None
