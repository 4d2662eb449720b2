"""A rank that is lost while another's host waits for a device is named, whatever the backend: with events that do not
come and a group that moves nothing, as NCCL without a peer."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import _create_fake_pg

from helpers.ranks import come, meet, run_ranks, wait_until
from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.errors import TrimtabError
from trimtab.guard.guard import Guard

HELD: list[Any] = []


class OnDevice(Tensor):
    device = torch.device("cuda", 0)  # type: ignore[assignment]


class Event:
    """Comes after some seconds, or breaks."""

    def __init__(self, seconds: float, error: str = "") -> None:
        self.at, self.error = time.monotonic() + seconds, error

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return time.monotonic() >= self.at


def on_rank(make: Any, lost: str) -> tuple[str, tuple[int, ...], str | None, str | None, str, float]:
    dist.Backend.register_backend("silent", _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])
    guard, events = (
        Guard(deadline=20.0),
        [Event(0.0), Event(0.2), Event(1e9, "device-side assert" * (lost == "assert"))],
    )
    transport = make(dist.new_group(backend="silent"), guard=guard)
    HELD.append(transport)
    assert not guard.gloo
    meet("built")  # without it a real exchange would not be over
    torch.accelerator.current_stream = lambda *_: SimpleNamespace(record_event=lambda: events.pop(0))  # type: ignore
    message = torch.zeros(2, 3, dtype=torch.int64).as_subclass(OnDevice)
    for call in range(2):
        guard.at("a", "count", "forward", call)
        transport.handshake(message)
    if dist.get_rank() == 1 and lost != "assert":
        guard.at("a", "experts", "forward", 1)
        if lost == "killed":
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if lost == "left":
            HELD.clear()
        come("lost")
        return "", (), "", "", "", 0.0
    if lost != "assert":
        wait_until("lost", 1)
    if lost == "slow":
        guard.deadline = 1.0
    start = time.monotonic()
    guard.at("b", "count", "forward", 2)
    try:
        transport.handshake(message)
    except Exception as error:
        named = (error.ranks, error.layer, error.phase) if isinstance(error, TrimtabError) else ((), "", "")
        return type(error).__name__, *named, str(error), time.monotonic() - start
    raise AssertionError


@pytest.mark.parametrize(
    ("make", "lost", "kind", "says"),
    [
        (AllToAll, "killed", "PeerLost", "is gone: its process has ended; it was last in experts forward of layer a"),
        (AllGather, "killed", "PeerLost", "is gone: its process has ended; it was last in experts forward of layer a"),
        (AllToAll, "left", "PeerLost", "has left the group"),
        (AllToAll, "slow", "PhaseTimeout", "is alive and in experts forward of layer a, call 1"),
        (AllToAll, "assert", "RuntimeError", "device-side assert"),
    ],
)
def test_a_host_that_waits_for_a_device_names_who_is_lost(make: Any, lost: str, kind: str, says: str) -> None:
    name, ranks, layer, phase, text, seconds = run_ranks(on_rank, 2, make, lost, deadline=40.0)[0]
    assert name == kind, text
    assert says in text
    assert seconds < 15.0, "before the deadline"
    if kind != "RuntimeError":
        assert (ranks, layer, phase) == ((1,), "a", "experts")
        assert "Rank 0 was waiting in count forward of layer b, call 2" in text
