"""The record of a rank: what others read of it, before and after its death."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from trimtab.errors import DesyncError
from trimtab.guard.judge import Answer, Cause, judge
from trimtab.guard.peers import Peer, process_state, start_of
from trimtab.guard.place import DIRECTIONS, PHASES, STATES, Place, Slate, SlateView
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


def test_a_verdict_of_many_ranks_is_read_whole() -> None:
    peers = [Peer(rank=r, global_rank=r, host="h" * 60, here="", pid=10**6 + r, start=1, fd=3) for r in range(512)]
    left = "it ended with ValueError: " + "é" * 20_000
    here = Place(layer="ü" * 60, phase="count", direction="forward", call=3)
    kinds = ({"heard": False}, {"process": "gone"}, {"process": "stopped"}, {"left": left, "heard": True})
    slate = Slate(0)
    for kind in kinds:
        cause = judge([Answer(peer=peer, **kind) for peer in peers], here, 30.0)
        slate.write_note(cause.to_json())
        assert Cause.in_note(slate.view().note()) == cause
        assert cause.ranks == tuple(range(512))
        assert "left" in kind or cause.message.count("rank 7 (") == 1
        assert "rank 8 (" not in cause.message
        assert "left" in kind or "So it is with 504 more." in cause.message
    told = Cause.of(DesyncError("so " * 50_000, ranks=tuple(range(5_000))))
    slate.write_note(told.to_json())
    assert Cause.in_note(slate.view().note()) == told
    assert Cause.in_note(told.to_json()[:-9]) is None, "in the middle of being written"
    assert Cause.in_note("it ended its program") is None
    slate.close()


def test_this_process_is_seen_too() -> None:
    slate = Slate(5)
    slate.write(b"layers.2", 1, 0, 4, 0)
    assert (os.getpid(), 5) in {(pid, rank) for pid, rank, _, _ in places_here()}
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


def no_descriptor(path: Path) -> str:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "read_text", no_descriptor)
            assert process_state(pid, peer.start) == peer.state() == "unknown", "it lives"
    finally:
        os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process_state(pid, peer.start) == "gone", "a zombie is gone"
    os.waitpid(pid, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", no_descriptor)
        assert peer.state() == "gone"
        with pytest.raises(OSError, match="Too many open files"):
            start_of(pid)
    assert process_state(pid, peer.start) == "gone"
    assert start_of(pid) == 0
    place = view.place()
    assert str(place) == "in experts backward of layer layers.7, call 5"
    assert view.note() == "last words"
    assert peer.open() is None, "nothing is left behind"
