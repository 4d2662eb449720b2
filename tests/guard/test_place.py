"""The record of a rank: what others read of it, before and after its death."""

from __future__ import annotations

import os
import signal
import time

import pytest

from trimtab.guard.peers import Peer, process_state, start_of
from trimtab.guard.place import DIRECTIONS, PHASES, STATES, Slate, SlateView
from trimtab.guard.scan import places_here


def test_a_place_is_read_as_it_was_written() -> None:
    slate = Slate(3)
    assert slate.view().place() is None
    for state in range(len(STATES)):
        for phase in range(len(PHASES)):
            slate.write(b"layers.1", phase, phase % 2, 2**40, state)
            place = slate.view().place()
            assert place is not None
            assert (place.layer, place.call) == ("layers.1", 2**40)
            assert (place.phase, place.direction, place.state) == (PHASES[phase], DIRECTIONS[phase % 2], STATES[state])
            assert 0 <= time.monotonic() - place.since < 5
    slate.wait(True)
    waiting = slate.view().place()
    assert waiting is not None
    assert str(waiting) == "waiting in combine forward of layer layers.1, call 1099511627776"
    assert slate.view().note() == ""
    slate.write_note("é" * 10_000)
    assert set(slate.view().note().rstrip("\ufffd")) == {"é"}
    slate.close()


def test_a_reader_keeps_no_file_open() -> None:
    slates = [Slate(rank) for rank in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    views = [SlateView.open(os.getpid(), slate.fd, slate.rank) for slate in slates]
    assert len(os.listdir("/proc/self/fd")) == before
    assert [view.rank() for view in views] == [0, 1, 2]
    for slate in slates:
        slate.close()
    assert len(os.listdir("/proc/self/fd")) == before - 3
    slates[2].write(b"after", 0, 0, 0, 0)
    assert str(views[2].place()) == "in route forward of layer after, call 0"
    with pytest.raises(OSError):
        SlateView.open(os.getpid(), slates[0].fd, 0)


def test_writing_takes_microseconds() -> None:
    slate = Slate(0)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for call in range(1000):
            slate.write(b"layers.1", 2, 0, call, 0)
        best = min(best, (time.perf_counter() - start) / 1000)
    slate.close()
    assert best < 20e-6, f"{best * 1e6:.1f} us"


def test_a_peer_reads_the_record_of_a_process_that_runs_is_stopped_and_is_dead() -> None:
    down, up = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing of torch or pytest may run here
        slate = Slate(1)
        slate.write(b"layers.7", PHASES.index("experts"), 1, 5, 0)
        slate.write_note("last words")
        os.write(up, Peer.me(1, 9, slate.fd).to_json().encode())
        signal.pause()
        os._exit(0)
    try:
        peer = Peer.from_json(os.read(down, 4096))
        assert peer.pid == pid
        assert str(peer).startswith("rank 1 (global rank 9, host ")
        view = peer.open()
        assert view is not None
        assert process_state(pid, peer.start) == "running"
        assert [(p, r, str(at)) for p, r, at, _ in places_here() if p == pid] == [
            (pid, 1, "in experts backward of layer layers.7, call 5")
        ]
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert process_state(pid, peer.start) == "stopped"
        assert process_state(pid, peer.start + 1) == "gone", "another process with the same number"
    finally:
        os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process_state(pid, peer.start) == "gone", "a zombie is gone"
    os.waitpid(pid, 0)
    assert process_state(pid, peer.start) == "gone"
    assert start_of(pid) == 0
    place = view.place()
    assert str(place) == "in experts backward of layer layers.7, call 5"
    assert view.note() == "last words"
    assert peer.open() is None, "nothing is left behind"
