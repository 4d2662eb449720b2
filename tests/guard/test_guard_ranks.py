"""The guard on real ranks that are healthy: it waits for the slow, sends nothing, and ends when it should."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import come, meet, run_ranks, wait_until
from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Transport
from trimtab.errors import ConfigError, DesyncError, PeerLost, PhaseTimeout
from trimtab.guard import peers
from trimtab.guard.guard import Guard

E, D = 4, 8


def step(dispatcher: Dispatcher, between: Callable[[], object] = lambda: None) -> None:
    x = torch.randn(5, D, requires_grad=True)
    rows = dispatcher.dispatch(x, torch.randint(0, E, (5, 2)), torch.rand(5, 2))
    between()
    dispatcher.combine(rows.x_MD * 2, rows).sum().backward()
    assert x.grad is not None


def lives_on_rank() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    guard = Guard(deadline=20.0)
    first = Dispatcher(E, AllToAll(group, guard=guard), layer="a")
    second = Dispatcher(E, AllGather(group, guard=guard), layer="b")
    before = set(threading.enumerate())
    for dispatcher in (first, second):
        step(dispatcher, lambda: time.sleep(0.35 * rank))
        place = guard.place()
        assert str(place) == f"in route backward of layer {dispatcher.layer}, call 0"
    assert set(threading.enumerate()) <= before
    dead = weakref.ref(guard)
    dist.barrier()
    del guard, first, second, dispatcher
    gc.collect()
    assert dead() is None


def test_slow_ranks_are_waited_for_without_a_thread() -> None:
    run_ranks(lives_on_rank, 2, deadline=40.0)


def two_threads_on_rank(make: Callable[..., Transport]) -> None:
    dispatcher = Dispatcher(E, make(dist.group.WORLD, guard=Guard(deadline=20.0)), layer="busy")
    step(dispatcher)
    other = Dispatcher(E, make(dist.group.WORLD, guard=Guard(deadline=20.0)), layer="other")  # of the same group
    errors: list[Exception] = []
    inside, refused = threading.Event(), threading.Event()

    spread = dispatcher.transport.dispatch  # type: ignore[union-attr]

    def slow(*args: object) -> object:
        inside.set()
        assert refused.wait(20.0)
        return spread(*args)  # type: ignore[arg-type]

    def second() -> None:
        assert inside.wait(20.0)
        try:
            step(other)
        except Exception as error:
            errors.append(error)
        refused.set()

    thread = threading.Thread(target=second, name="second")
    thread.start()
    dispatcher.transport.dispatch = slow  # type: ignore[union-attr, method-assign, assignment]
    try:
        step(dispatcher)
    except DesyncError as error:  # the peers', or this rank's own
        errors.append(error)
    thread.join()
    assert "thread 'second' began an exchange while thread 'MainThread' of this rank was in one" in str(errors[0])
    assert (errors[0].layer, errors[0].phase) == ("other", "route")  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [AllToAll, AllGather, SharedMemory])
def test_a_second_thread_is_refused_while_one_exchanges(make: Callable[..., Transport]) -> None:
    run_ranks(two_threads_on_rank, 2, make, deadline=40.0)


def settings_on_rank() -> None:
    group = dist.group.WORLD
    own, shared, off = (
        AllToAll(group), AllToAll(group, guard=(guard := Guard(deadline=5.0))), AllToAll(group, guard=False),
    )  # fmt: skip
    assert off.guard is None
    assert shared.guard is guard
    assert guard.deadline == 5.0
    assert own.guard is not None
    assert own.guard.deadline == pytest.approx(0.9 * 40.0), "before the group's own timeout, which names nobody"
    other = dist.new_group([0, 1])
    with pytest.raises(ConfigError, match="another process group"):
        AllToAll(other, guard=guard)
    names = [Dispatcher(E, shared).layer for _ in range(2)] + [Dispatcher(E, shared, layer="x").layer]
    assert names == ["(unnamed 0)", "(unnamed 1)", "x"]
    unnamed = [Dispatcher(E, shared), Dispatcher(E, shared)]
    with pytest.raises(DesyncError, match=r"count forward of layer \(unnamed [34]\)"):
        step(unnamed[dist.get_rank()])
    for transport in (own, shared, off, AllToAll(other)):
        step(Dispatcher(E, transport))


def test_each_transport_has_a_guard_or_shares_one_or_has_none() -> None:
    run_ranks(settings_on_rank, 2, deadline=40.0)


def subgroup_on_rank() -> list[tuple[str, tuple[int, ...], float]]:
    """What a rank is told, if anything, after how many seconds. Rank 2 stays with its experts until 3 gives it up."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    guard = Guard(deadline=20.0)
    dispatcher = Dispatcher(E, AllToAll(groups[rank // 2], guard=guard), layer="a")
    step(dispatcher)

    def between() -> None:
        if rank == 2:
            come("experts")
            wait_until("given up", 3)
        if rank == 3:
            wait_until("experts", 2)
            guard.deadline = 1.5

    start = time.monotonic()
    try:
        step(dispatcher, between)
    except Exception as error:
        come("given up")
        return [(str(error), getattr(error, "ranks", ()), time.monotonic() - start)]
    return []


@pytest.mark.xdist_group("ranks4")
def test_a_rank_of_a_subgroup_is_named_within_its_group_and_in_the_world() -> None:
    """Ranks of a group are in the order in which torch keeps them, whatever the order they were given in."""
    healthy, also, late, asker = run_ranks(subgroup_on_rank, 4, deadline=40.0)
    assert healthy == also == []
    ((message, ranks, seconds),) = asker
    assert ranks == (1,) or ranks == (0,)
    assert f"rank {ranks[0]} (global rank 2, host " in message
    told = re.search(r"is alive and in experts forward of layer a, call 1, for (\d+\.\d) s", message)
    assert told is not None, message
    assert 1.5 <= float(told[1]) <= seconds + 0.05
    assert late != [], "the late rank is told that the others gave up"


def absent_on_rank() -> str:
    group = dist.new_group([0, 1])  # its own, for the exchange that never ends
    if dist.get_rank() == 1:  # as if it still loaded its weights: it stays until all have answered
        return ""
    dispatcher = Dispatcher(E, AllToAll(group, guard=Guard(deadline=1.0)), layer="a")
    with pytest.raises(PhaseTimeout) as raised:
        step(dispatcher)
    return f"{raised.value.ranks} {raised.value}"


def test_a_rank_that_is_busy_before_its_first_layer_is_named() -> None:
    said, _ = run_ranks(absent_on_rank, 2, deadline=40.0)
    assert said.startswith("(1,) [layer a, rank 1, phase count] rank 1 has not built its transport")


def late_on_rank(remote: bool) -> str:
    if remote:  # as if each rank ran on a host of its own
        peers._here = lambda: f"host {dist.get_rank()}"
    guard = Guard(deadline=20.0)
    dispatcher = Dispatcher(E, AllToAll(dist.group.WORLD, guard=guard), layer="a")
    early = [rank for rank in range(dist.get_world_size()) if rank != 1]

    def hurry() -> None:
        """Nobody's patience ends before all but rank 1 wait."""
        while (place := guard.place()) is None or place.state != "waiting in":
            time.sleep(0.02)
        come("waiting")
        for rank in early:
            wait_until("waiting", rank)
        guard.deadline = 1.0

    if dist.get_rank() == 1:
        for rank in early:
            wait_until("given up", rank)
        guard.deadline = 1.0
    else:
        threading.Thread(target=hurry).start()
    with pytest.raises(PhaseTimeout) as raised:
        step(dispatcher)
    come("given up")
    meet("all told")  # a rank that has ended tells the others no more
    return f"{raised.value.ranks} {raised.value}".split(" Rank ")[0]


def other_transport_on_rank() -> str:
    kind = AllGather if dist.get_rank() else AllToAll
    dispatcher = Dispatcher(E, kind(dist.group.WORLD, guard=Guard(deadline=1.0)), layer="a")
    meet("built")
    with pytest.raises(DesyncError) as raised:
        step(dispatcher)
    meet("told")  # whoever ends first must not be all that the other hears of
    return str(raised.value)


def test_ranks_with_different_transports_are_told_so() -> None:
    """They wait in different collectives, which can compare nothing."""
    for said in run_ranks(other_transport_on_rank, 2, deadline=40.0):
        assert "rank 0 (" in said or "rank 1 (" in said
        assert " exchanges by All" in said
        assert "they never meet. Give every rank of a group the same transport." in said


@pytest.mark.xdist_group("ranks4")
def test_a_rank_that_is_late_for_the_first_exchange_is_named_by_all() -> None:
    """Those who wait have not met yet."""
    said = run_ranks(late_on_rank, 4, False, deadline=40.0)
    assert len(set(said)) == 1
    assert said[0].startswith("(1,) [layer a, rank 1, phase count] rank 1 (")
    assert "is alive and has not begun its first call" in said[0]


def test_ranks_of_other_hosts_are_said_to_be_unseen() -> None:
    for rank, said in enumerate(run_ranks(late_on_rank, 2, True, deadline=40.0)):
        assert said.startswith(f"({1 - rank},) [layer a, rank {1 - rank}, phase ")
        assert "nothing moved for 1 s, and all ranks of this host live: look at those of other hosts" in said


def unanswered_on_rank() -> tuple[str, float, int]:
    guard, asked, group = Guard(deadline=0.5), threading.Event(), dist.new_group([0, 1])
    dispatcher = Dispatcher(E, AllToAll(group, guard=guard), layer="a")
    if dist.get_rank() == 1:
        return "", 0.0, 0
    guard._introductions._store = SimpleNamespace(check=lambda keys: asked.wait(20.0))  # type: ignore[assignment]
    before, start = threading.active_count(), time.monotonic()
    with pytest.raises(PeerLost) as raised:
        step(dispatcher)
    seconds, threads = time.monotonic() - start, threading.active_count() - before
    asked.set()
    return str(raised.value), seconds, threads


def test_a_store_that_does_not_answer_holds_nobody_up_in_a_first_exchange() -> None:
    (said, seconds, threads), _ = run_ranks(unanswered_on_rank, 2, deadline=40.0)
    assert "the store of the group does not answer, so nothing is known of the other ranks" in said
    assert seconds < 4.0, "the deadline, and patience with the store"
    assert threads <= 2, "one that asks while the rank waits, one behind the deadline"


def test_a_deadline_must_be_positive() -> None:
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="must be above 0"):
            Guard(deadline=wrong)
