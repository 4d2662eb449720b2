"""How the ranks of a group get to know each other through a store that is slow, dead, or knows some of them only."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from trimtab.errors import PeerLost
from trimtab.guard.guard import Guard
from trimtab.guard.last_words import LastWords
from trimtab.guard.peers import Peer, start_of
from trimtab.verify.ranks import run_ranks

RANKS = 1024


class Store:
    """Of a group of `RANKS`, by keys "peer/<rank>": all are in this process, and have a record that nobody can read."""

    def __init__(self, absent: int | None = None, pause: float = 0.0, error: str = "") -> None:
        self.absent, self.pause, self.error, self.asked = absent, pause, error, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        if self.error:
            raise RuntimeError(self.error)
        time.sleep(self.pause)
        return f"peer/{self.absent}" not in keys

    def get(self, key: str) -> str:
        self.asked += 1
        rank, mine = int(key.removeprefix("peer/")), Peer.me(0, 0, 10**6)
        return Peer(**{**vars(mine), "rank": rank, "global_rank": rank, "start": start_of(os.getppid())}).to_json()

    def multi_get(self, keys: list[str]) -> list[str]:
        found = [self.get(key) for key in keys]
        self.asked -= len(keys) - 1
        return found

    def clone(self) -> Store:
        raise RuntimeError("the watch has no part in this")


def judged_on_rank(patience: float, store: Store) -> tuple[str, int, list[str]]:
    raised: list[str] = []
    threading.excepthook = lambda given: raised.append(str(given.exc_value))  # this process ends with the test
    guard = Guard(patience=patience).join(dist.group.WORLD)
    guard._store, guard._world, guard.size = store, list(range(RANKS)), RANKS
    error = guard._judged(time.monotonic(), "Connection closed by peer")
    return f"{type(error).__name__} {error}", store.asked, raised


def test_a_verdict_may_come_while_the_peers_are_still_being_looked_up() -> None:
    ((said, _, raised),) = run_ranks(judged_on_rank, 1, 0.1, Store(absent=RANKS - 1, pause=3e-4))
    assert said.startswith("PeerLost")
    assert "is gone: its process has ended" in said
    assert raised == []


def test_a_store_that_is_dead_at_the_first_meeting_is_said_so() -> None:
    ((said, _, raised),) = run_ranks(judged_on_rank, 1, 0.2, Store(error="Broken pipe\nin C++"))
    assert said.startswith("PeerLost")
    assert "the store does not answer (Broken pipe)" in said
    assert raised == [], "the thread ends without a traceback"


@pytest.mark.parametrize(("absent", "questions"), [(None, 2), (5, 2 * (RANKS - 1))])
def test_peers_that_have_all_come_are_read_at_once(absent: int | None, questions: int) -> None:
    ((_, asked, _),) = run_ranks(judged_on_rank, 1, 20.0, Store(absent=absent))
    assert asked == questions


def leaves_on_rank() -> str:
    group = dist.group.WORLD
    guard, store = Guard(deadline=0.5).join(group), _get_process_group_store(group)
    usual = store.timeout
    if dist.get_rank() == 1:
        guard.close()
    dist.barrier()
    assert store.timeout == usual
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(PeerLost) as lost:
        guard.wait(dist.all_reduce(torch.ones(1), async_op=True))
    return str(lost.value)


def test_last_words_do_not_wait_for_who_waits_for_the_store() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True)
    other, me = store.clone(), Peer.me(0, 0, -1)
    waiting = threading.Thread(target=store.get, args=("answer",), daemon=True)
    waiting.start()
    time.sleep(0.2)
    answered = threading.Timer(3.0, other.set, ("answer", ""))
    answered.start()
    LastWords(store).say("a", me)
    assert waiting.is_alive()
    assert Peer.from_json(store.clone().get(f"a/peer/{me.rank}")) == me
    answered.join()
    waiting.join()


def test_a_rank_that_leaves_before_the_first_meeting_has_left_word() -> None:
    said, _ = run_ranks(leaves_on_rank, 2, deadline=40.0)
    assert "has left the group: it ended its program or gave up its transport" in said
