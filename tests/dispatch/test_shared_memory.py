"""Rows through shared memory: the bits of the all-to-all, memory that is used again, and what cannot be is refused."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.cases import PATTERNS, case
from helpers.exchanges import Said, said_of
from helpers.forks import start
from helpers.ranks import _rank_main, come, run_ranks, wait_until
from trimtab.dispatch import dispatcher as dispatcher_module
from trimtab.dispatch import shared_memory
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.options import CombineMode
from trimtab.dispatch.shared_memory import SharedMemory, wait_for
from trimtab.dispatch.transports import Auto
from trimtab.errors import BackendError, PeerLost, PhaseTimeout
from trimtab.guard import peers
from trimtab.guard.guard import Guard
from trimtab.guard.peers import Introductions

E, K, D = 8, 3, 16


def layer(dispatcher: Dispatcher, x: Tensor, ids: Tensor, w: Tensor, mask: Tensor | None = None) -> Tensor:
    """Experts without parameters whose outputs and gradients differ by expert and rank."""
    rows = dispatcher.dispatch(x, ids, w, mask)
    here = (rows.weights_MK * (rows.ids_MK >= 0)).sum(1, keepdim=True) + dist.get_rank()
    return dispatcher.combine((rows.x_MD * here.to(rows.x_MD.dtype)).tanh(), rows)


def results(transport: Any, dtype: torch.dtype, combine: CombineMode) -> list[Tensor]:
    dispatcher = Dispatcher(E, transport, combine=combine, layer="moe")
    found = []
    for seed, pattern in enumerate(PATTERNS):
        x, ids, w, mask = case(pattern, dist.get_rank(), dist.get_world_size(), E, K, D, dtype, seed)
        y = layer(dispatcher, x.requires_grad_(), ids, w.requires_grad_(), mask)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))]
    return found


def bits_on_rank(kinds: list[tuple[torch.dtype, CombineMode, bool]]) -> list[bool]:
    group = dist.group.WORLD
    equal = []
    for dtype, combine, guard in kinds:
        truth = results(AllToAll(group, guard=guard), dtype, combine)
        ours = results(SharedMemory(group, guard=guard), dtype, combine)
        equal.append(all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True)))
    return equal


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.xdist_group("ranks4"))])
def test_outputs_and_gradients_have_the_bits_of_the_all_to_all(ranks: int) -> None:
    kinds: list[tuple[torch.dtype, CombineMode, bool]] = [
        (torch.bfloat16, "sum", True), (torch.float32, "ordered", False), (torch.float64, "sum", False),
    ]  # fmt: skip
    for equal in run_ranks(bits_on_rank, ranks, kinds):
        assert equal == [True] * len(kinds)


def lives_on_rank() -> dict[str, Any]:
    """Several calls in flight over one transport, whose rows nobody may overwrite, then the same again and again."""
    rank = dist.get_rank()
    transport = SharedMemory(dist.group.WORLD)
    layers = [Dispatcher(E, transport, layer=name) for name in "abc"]
    slots, found = [], {"kept": True}
    for step in range(4):
        for tokens in (7, 3000, 0):  # 3,000 tokens need a slot to grow, which then serves 7
            x = torch.randn(tokens + rank, D, generator=torch.Generator().manual_seed(step))
            ids = torch.rand(x.shape[0], E).argsort(1)[:, :K]
            flying = [one.dispatch(x + i, ids, torch.rand(ids.shape)) for i, one in enumerate(layers)]
            copies = [rows.x_MD.clone() for rows in flying]
            for one, rows in zip(layers, flying, strict=True):
                one.combine(rows.x_MD * 2, rows)
                layer(one, x, ids, torch.rand(ids.shape))
            found["kept"] &= all(torch.equal(a.x_MD, b) for a, b in zip(flying, copies, strict=True))
            found["contiguous"] = all(rows.x_MD.is_contiguous() for rows in flying)
            del flying, rows
        slots.append(len(transport._host._slots))
    found["slots"] = slots
    with torch.inference_mode():
        layer(layers[0], x, ids, torch.rand(ids.shape))
    x = torch.randn(9, D, requires_grad=True)
    ids, w = torch.rand(9, E).argsort(1)[:, :K], torch.rand(9, K)
    plain = torch.autograd.grad(layer(layers[0], x, ids, w).sum(), x)[0]
    for reentrant in (True, False):
        y = checkpoint(layer, layers[1], x, ids, w, use_reentrant=reentrant)
        (again,) = torch.autograd.grad(y.sum(), x) if not reentrant else (_reentrant_grad(y, x),)
        found[f"recomputed {reentrant}"] = torch.equal(again, plain)
    rows = layers[2].dispatch(x, ids, w)
    copy = rows.x_MD.detach().clone()
    found["descriptors"] = len(arenas())
    kept = rows.x_MD.detach()
    dist.barrier()
    del transport, layers, rows, y, one
    gc.collect()
    found["closed"] = arenas() == []
    found["outlives"] = torch.equal(kept, copy)
    return found


def arenas() -> list[str]:
    """This process's descriptors of rows."""
    return [fd for fd in os.listdir("/proc/self/fd") if "trimtab-rows" in _link(f"/proc/self/fd/{fd}")]


def _reentrant_grad(y: Tensor, x: Tensor) -> Tensor:
    x.grad = None
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


@pytest.mark.xdist_group("ranks4")
def test_rows_in_flight_are_nobody_elses_and_their_memory_is_used_again() -> None:
    for found in run_ranks(lives_on_rank, 4, deadline=60.0):
        slots = found.pop("slots")
        assert slots[-1] == slots[1] <= 8, "no more slots than tensors were in use at once"
        assert found.pop("descriptors") == 4, "one arena a rank, however many slots it has"
        assert found == dict.fromkeys(found, True)


def refused_on_rank() -> tuple[dict[str, Said], list[tuple[str, str]]]:
    group, rank, said = dist.group.WORLD, dist.get_rank(), {}
    x, ids, w, _ = case("random", rank, 2, E, K, D, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_here", lambda: f"host {rank}")
        patch.setattr(socket, "gethostname", lambda: f"h{rank}")
        shared, auto = SharedMemory(group), Auto(group)
        said["hosts"] = said_of(lambda: Dispatcher(E, shared).dispatch(x, ids, w))
        layer(Dispatcher(E, auto), x, ids, w)
    message = torch.zeros(2, 4, dtype=torch.int64, device="meta" if rank else "cpu")
    said["device"] = said_of(lambda: SharedMemory(group).handshake(message))
    here, good = Auto(group, guard=False), SharedMemory(group, guard=Guard(deadline=20.0))
    for transport in (here, good):
        layer(Dispatcher(E, transport), x, ids, w)
    said["device later"] = said_of(lambda: good.handshake(message))
    return said, [(type(each.chosen).__name__, each.why) for each in (auto, here)]


def test_what_cannot_share_memory_is_refused_before_data_moves_on_every_rank() -> None:
    for said, ((far, why), here) in run_ranks(refused_on_rank, 2, deadline=60.0):
        for what, kind, text in (
            (
                "hosts",
                "ConfigError",
                "2 hosts or in as many containers (h0: ranks 0; h1: ranks 1). Use the transport all",
            ),
            ("device", "ConfigError", "the tensors are on cpu, meta, and only those of the CPU can be shared"),
            ("device later", "BackendError", "rank 1 brings tensors of meta"),
        ):
            assert said[what].kind == kind, said[what]
            assert text in said[what].message
        assert (far, here) == ("AllToAll", ("SharedMemory", ""))
        assert "on 2 hosts" in why


INSIDE = ("inbox_of", "_part", "take", "turn", "plan_ranks", "experts")
"""Where rank 1 fails: in a step of an exchange, or, the last two, between two of one call."""


def fails_inside_on_rank() -> dict[str, tuple[str, str]]:
    """What each rank ends its call with in which rank 1 fails, whose batch is then skipped, and its next one."""
    group, rank, said = dist.group.WORLD, dist.get_rank(), {}
    x, ids, w, _ = case("random", rank, 2, E, K, D, torch.float64)
    x.requires_grad_()

    def call(dispatcher: Dispatcher, experts: Callable[[], None], then: Callable[[], None]) -> list[Tensor]:
        rows = dispatcher.dispatch(x, ids, w)
        scaled = rows.x_MD * 2.0
        experts()
        y = dispatcher.combine(scaled, rows)
        then()
        return [y.detach(), *torch.autograd.grad(y.square().sum(), x)]

    def nothing() -> None:
        pass

    truth = call(Dispatcher(E, AllToAll(group)), nothing, nothing)
    for place, direction, guard in itertools.product(INSIDE, ("forward", "backward"), (True, False)):
        if direction == "backward" and place in INSIDE[-2:]:
            continue
        transport = SharedMemory(group, guard=guard)
        dispatcher = Dispatcher(E, transport, layer="moe")
        call(dispatcher, nothing, nothing)
        with pytest.MonkeyPatch.context() as patch:

            def fail(*_: object, **__: object) -> Any:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

            def spoil(patch: pytest.MonkeyPatch = patch, place: str = place, host: Any = transport._host) -> None:
                if rank == 1 and place == "turn":  # all have met
                    turn = host.turn
                    patch.setattr(host, "turn", lambda: (turn(), fail()))
                elif rank == 1 and place != "experts":
                    modules = {"_part": shared_memory, "plan_ranks": dispatcher_module, "take": host}
                    patch.setattr(modules.get(place, host), place, fail)

            between = place in INSIDE[-2:]
            if place == "plan_ranks":
                spoil()
            experts = fail if place == "experts" and rank == 1 else spoil if direction == "forward" else nothing
            ends = []
            for args in ((experts, spoil if direction == "backward" else nothing), (nothing, nothing)):
                try:
                    same = all(torch.equal(a, b) for a, b in zip(call(dispatcher, *args), truth, strict=True))
                    ends.append("right" if same else "wrong")
                except Exception as error:
                    ends.append(f"{type(error).__name__}: {error}")
                if between:
                    if rank == 0:  # its one call has met both of rank 1's
                        break
                    patch.undo()
        said[f"{place} {direction} {guard}"] = (ends[0], ends[-1])
        dist.barrier()
    return said


def test_a_rank_that_fails_inside_an_exchange_is_noticed_in_it() -> None:
    zero, one = run_ranks(fails_inside_on_rank, 2, deadline=60.0)
    assert len(one) == 20
    for name, (first, second) in one.items():
        peer, peer_next = zero[name]
        assert "wrong" not in (first, second, peer, peer_next), name
        if name.split()[0] in INSIDE[-2:]:  # its next count meets the rows that it did not send
            assert first.startswith("OSError"), name
            assert peer.startswith("DesyncError"), name
            assert second.startswith("DesyncError"), name
            continue
        text = "OSError inside an exchange of "
        where = f"BackendError: [{'layer moe, ' * name.endswith('True')}rank 1"
        assert first.startswith(where), name
        assert text in first, name
        assert "rows" in first or name.startswith("turn"), name
        assert "use the transport alltoall; build new transports on all ranks" in first, name
        assert peer.startswith(where), name
        assert (text if name.endswith("True") else "rank 1 gave up this shared memory") in peer, name
        assert "was given up on rank 1 (OSError" in second, name
        assert "was given up on rank 0 (BackendError" in peer_next, name


def unopened_on_rank() -> dict[str, Any]:
    """Rank 1 may not look at the processes of others, as under hidepid or where ranks run as several users."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, ids, w, _ = case("random", rank, ranks, E, K, D, torch.float64)
    said: dict[str, Any] = {}
    readlink = os.readlink

    def refuse(path: str) -> str:
        if rank == 1 and path.startswith("/proc/") and "/fd/" in path and "/self/" not in path:
            raise PermissionError(13, "Permission denied", path)
        return readlink(path)

    truth = layer(Dispatcher(E, AllToAll(group)), x, ids, w)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "readlink", refuse)
        for guard in (True, False):
            start = time.monotonic()
            auto = Auto(group, guard=guard)
            for _ in range(2):
                equal = torch.equal(layer(Dispatcher(E, auto), x, ids, w), truth)
            said[f"auto {guard}"] = (type(auto.chosen).__name__, equal, auto.why)
            shared = SharedMemory(group, guard=guard)
            for name in ("first", "again"):
                said[f"{name} {guard}"] = said_of(lambda on=shared: layer(Dispatcher(E, on), x, ids, w))
            said[f"seconds {guard}"] = time.monotonic() - start
    after = Auto(group)
    layer(Dispatcher(E, after), x, ids, w)
    said["after"] = type(after.chosen).__name__
    del auto, shared, after
    gc.collect()
    said["closed"] = arenas() == []
    return said


@pytest.mark.xdist_group("ranks4")
def test_a_rank_that_cannot_open_the_others_memory_is_agreed_on() -> None:
    every = run_ranks(unopened_on_rank, 4, deadline=60.0)
    for said in every:
        for guard in (True, False):
            chosen, equal, why = said[f"auto {guard}"]
            assert (chosen, equal) == ("AllToAll", True)
            assert why == every[0][f"auto {guard}"][2]
            assert "rank 1 cannot open" in why
            first, again = said[f"first {guard}"], said[f"again {guard}"]
            assert first[:2] == ("BackendError", (1,))
            assert "rank 1 cannot open what its peers share: [Errno 13] Permission denied: '/proc/" in first.message
            assert first.message.endswith("see each other in /proc; use the transport alltoall where they do not")
            assert "was given up on rank" in again.message
            assert said[f"seconds {guard}"] < 15.0
        assert said["after"] == "SharedMemory"
        assert said["closed"]


def alone_on_rank() -> tuple[str, tuple[int, ...], str, float]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    transport = SharedMemory(group, guard=False)
    headers = torch.zeros(2, 4, dtype=torch.int64)
    transport.handshake(headers)
    dist.barrier()
    if dist.get_rank() == 1:
        wait_until("given up", 0)
        return "", (), "", 0.0
    start = time.monotonic()
    try:
        transport.handshake(headers)
    except (PeerLost, PhaseTimeout) as error:
        waited = time.monotonic() - start
        come("given up")
        try:
            transport.handshake(headers)
        except BackendError as again:
            return type(error).__name__, error.ranks, str(again), waited
    return "nothing", (), "", 0.0


def test_without_a_guard_the_group_s_timeout_ends_the_wait_and_the_transport_is_given_up() -> None:
    kind, ranks, again, waited = run_ranks(alone_on_rank, 2, deadline=40.0)[0]
    assert (kind, ranks) == ("PhaseTimeout", (1,))
    assert 2.0 <= waited < 5.0
    assert "was given up on rank 0 (PhaseTimeout" in again


def store_dies_on_rank() -> list[str]:
    introductions = Introductions(dist.group.WORLD, "test")
    broken = Mock(side_effect=dist.DistNetworkError("connection reset\nwith a trace"))
    introductions._store = SimpleNamespace(check=broken)
    said = []
    for wait in (lambda: introductions.wait(timedelta(seconds=1)), lambda: wait_for(introductions, None, 5.0)):
        with pytest.raises(RuntimeError) as raised:
            wait()
        said.append(str(raised.value))
    assert introductions.is_completed()
    return said


def test_a_store_that_dies_ends_the_first_meeting() -> None:
    assert run_ranks(store_dies_on_rank, 1) == [["connection reset", "connection reset"]]


def crash_on_rank(pipe: Any) -> None:
    x, ids, w, _ = case("random", dist.get_rank(), 2, E, K, D, torch.float32)
    dispatcher = Dispatcher(E, SharedMemory(dist.group.WORLD))
    rows = dispatcher.dispatch(x, ids, w)
    pipe.send([os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd")
               if "memfd:trimtab" in _link(f"/proc/self/fd/{fd}")])  # fmt: skip
    time.sleep(60.0)
    del rows


def test_ranks_that_are_killed_leave_no_memory_behind(tmp_path: Path) -> None:
    """Its files have no name, and no process that lives has them open or mapped."""
    processes, inodes = [], set()
    for rank in range(2):
        (ours, theirs), (_, answers) = Pipe(), Pipe()
        args = (crash_on_rank, rank, 2, str(tmp_path / "store"), 60.0, ())
        processes.append((start(_rank_main, *args, pipes=[theirs, answers]), ours))
    for _, pipe in processes:
        assert pipe.poll(60.0)
        inodes |= set(pipe.recv())
    assert len(inodes) >= 3, "two arenas and the control page"
    for process, _ in processes:
        files = _files_of(process.pid)
        assert any("memfd:trimtab-rows" in file for file in files)
        assert not [file for file in files if file.startswith("/dev/shm/") and not file.endswith(" (deleted)")]
        process.kill()
    assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if inodes & _memory_of(pid)]


def _files_of(pid: int) -> list[str]:
    """What a process has open or mapped."""
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = [line.split(maxsplit=5)[5] for line in mapped if line.count("/")]
    return names + [_link(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]


def _memory_of(pid: str) -> set[int]:
    """Inodes of the nameless files of ours that a process has open or mapped."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:trimtab" in line:
                found.add(int(line.split()[4]))
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if "memfd:trimtab" in _link(f"/proc/{pid}/fd/{fd}"):
                found.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    except OSError:
        return found
    return found
