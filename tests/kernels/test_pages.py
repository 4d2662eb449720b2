"""Pages are handed out again, never twice at a time, and little more than was once in use."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from trimtab.kernels import pages as pages_module
from trimtab.kernels.pages import SLACK, Pages, shared_pages

BIG = 1 << 20


def test_what_is_freed_is_handed_out_again() -> None:
    pages = Pages()
    a, b = (pages.empty(BIG, dtype=torch.float32) for _ in range(2))
    where = {a.data_ptr(), b.data_ptr()}
    assert len(where) == 2
    part = a[10:20]
    del a
    c = pages.empty(BIG, dtype=torch.float32)
    assert c.data_ptr() not in where  # `part` still holds a's memory
    del part, b
    d, e = (pages.empty(BIG // 2, 2, dtype=torch.float32) for _ in range(2))
    assert {d.data_ptr(), e.data_ptr()} == where
    assert d.untyped_storage().nbytes() == 4 * BIG
    assert not d._is_view()  # autograd may change it in place


def test_little_more_is_kept_than_was_once_used() -> None:
    pages = Pages()
    for n in (3, 5, 2, 7, 1, 4):
        a = pages.empty(n * BIG, dtype=torch.float32)
        assert pages.used + pages.idle <= pages.most * SLACK
        del a
        assert pages.used == 0
        assert pages.idle <= pages.most * SLACK
    assert pages.most < 1.13 * 7 * BIG * 4


def test_threads_may_share_them() -> None:
    pages, bad = Pages(), []

    def work(number: int) -> None:
        for i in range(200):
            t = pages.empty(1 << 18, dtype=torch.float32)
            t.fill_(number)
            if not bool((t == number).all()):
                bad.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    assert pages.used == 0


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

    def __getitem__(self, index: Any) -> Any:
        self.step()
        return super().__getitem__(index)

    def __delitem__(self, index: Any) -> None:
        self.step()
        super().__delitem__(index)

    def append(self, x: Any) -> None:
        self.step()
        super().append(x)


def test_a_finalizer_may_run_at_every_step_and_take_memory_itself() -> None:
    unit, steps = 1 << 17, 0

    class Garbage:
        def __init__(self, pages: Pages, taken: list[torch.Tensor]) -> None:
            self.pages, self.taken, self.me = pages, taken, self
            self.tensor = pages.empty(unit, dtype=torch.float32)

        def __del__(self) -> None:
            self.taken.append(self.pages.empty(unit, dtype=torch.float32))

    gc.collect()
    gc.freeze()  # what was there before is not looked at again each time
    gc.disable()
    try:
        for when in range(100):
            pages, taken = Pages(), []
            before = [pages.empty(n * unit, dtype=torch.float32) for n in (1, 2, 1, 3)]
            Garbage(pages, taken)
            before.clear()
            pages._free = Restless(pages._free, when)
            alive = [pages.empty(n * unit, dtype=torch.float32) for n in (3, 1, 2)]
            if not taken:
                break
            steps += 1
            assert [t.untyped_storage().nbytes() // 4 // unit for t in alive + taken] == [3, 1, 2, 1], when
            assert len({t.data_ptr() for t in alive + taken}) == 4, "nobody has what another has"
            assert pages.used == 7 * unit * 4
            assert pages.used + pages.idle <= pages.most * SLACK
            assert pages.idle == sum(map(len, list(pages._free)))
            alive.clear()
            taken.clear()
            assert pages.used == 0
    finally:
        gc.enable()
        gc.unfreeze()
    assert steps >= 10


@pytest.mark.usefixtures("poisoned")
def test_they_are_poisoned_where_fresh_memory_is() -> None:
    pages = Pages()
    for _ in range(2):
        a = pages.empty(BIG, dtype=torch.bfloat16)
        assert a.isnan().all()
        a.zero_()
        del a


def test_they_go_with_the_last_who_shares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_shared", weakref.WeakValueDictionary())
    first, second = shared_pages(), shared_pages()
    assert first is second
    gone = weakref.ref(first)
    del first, second
    gc.collect()
    assert gone() is None
