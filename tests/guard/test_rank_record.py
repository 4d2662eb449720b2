"""The record of a rank: what others read of it, before and after its death."""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from trimtab.errors import DesyncError
from trimtab.guard.peers import PeerInfo, _here, process_state, start_of
from trimtab.guard.record import DIRECTIONS, PHASES, STATES, Place, RankRecord, places_here
from trimtab.guard.verdict import Seen, Verdict, judge


def test_a_place_is_read_as_it_was_written() -> None:
    record = RankRecord.create(3)
    assert record.place() is None
    for state in range(len(STATES)):
        for phase in range(len(PHASES)):
            before = time.monotonic()
            record.write("layers.1", PHASES[phase], DIRECTIONS[phase % 2], 2**40, STATES[state])
            after = time.monotonic()
            place = record.place()
            assert place is not None
            assert (place.layer, place.call) == ("layers.1", 2**40)
            assert (place.phase, place.direction, place.state) == (PHASES[phase], DIRECTIONS[phase % 2], STATES[state])
            assert before <= place.since <= after
    record.wait(True)
    waiting = record.place()
    assert waiting is not None
    assert str(waiting) == "waiting in combine forward of layer layers.1, call 1099511627776"
    assert record.note() == ""
    record.write_note("é" * 10_000)
    assert set(record.note().rstrip("\ufffd")) == {"é"}
    record.close()


def test_a_verdict_of_many_ranks_is_read_whole() -> None:
    peers = [PeerInfo(rank=r, global_rank=r, host="h" * 60, pid=10**6 + r) for r in range(512)]
    left = "it ended with ValueError: " + "é" * 20_000
    here = Place(layer="ü" * 60, phase="count", direction="forward", call=3)
    record = RankRecord.create(0)
    for kind in ({}, {"process": "gone"}, {"process": "stopped"}, {"left": left}):
        verdict = judge([Seen(peer=peer, **kind) for peer in peers], here, 30.0)
        record.write_note(verdict.to_note())
        assert Verdict.in_note(record.note()) == verdict
        assert verdict.ranks == tuple(range(512))
        assert "left" in kind or verdict.message.count("rank 6 (") == 1
        assert "rank 8 (" not in verdict.message
        assert "left" in kind or " more." in verdict.message
    told = Verdict.of(DesyncError("so " * 50_000, ranks=tuple(range(5_000))))
    record.write_note(told.to_note())
    assert Verdict.in_note(record.note()) == told
    assert Verdict.in_note(told.to_note()[:-9]) is None, "in the middle of being written"
    assert Verdict.in_note("it ended its program") is None
    record.close()


def test_this_process_is_seen_too() -> None:
    record = RankRecord.create(5)
    record.write("layers.2", "count", "forward", 4)
    assert (os.getpid(), 5) in {(pid, rank) for pid, rank, _ in places_here()}
    record.close()


def descriptors() -> set[int]:
    """This process's own of records."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself, closed by now
            if link.readlink().name.startswith("memfd:trimtab-record"):
                found.add(int(link.name))
    return found


def test_a_reader_keeps_no_file_open() -> None:
    before = descriptors()
    records = [RankRecord.create(rank) for rank in range(3)]
    views = [RankRecord.open(os.getpid(), record.fd, record.rank) for record in records]
    assert descriptors() - before == {record.fd for record in records}
    assert [view.rank for view in views] == [0, 1, 2]
    for record in records:
        record.close()
    assert descriptors() <= before
    records[2].write("after", "route", "forward", 0)
    assert str(views[2].place()) == "in route forward of layer after, call 0"
    with pytest.raises(OSError):
        RankRecord.open(os.getpid(), records[0].fd, 0)


def no_descriptor(path: Path) -> str:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))


def test_a_peer_reads_the_record_of_a_process_that_runs_is_stopped_and_is_dead() -> None:
    down, up = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing of torch or pytest may run here
        record = RankRecord.create(1)
        record.write("layers.7", "experts", "backward", 5)
        record.write_note("last words")
        os.write(up, f"{record.fd} {start_of(os.getpid())}".encode())
        signal.pause()
        os._exit(0)
    try:
        fd, started = map(int, os.read(down, 4096).split())
        peer = PeerInfo(rank=1, global_rank=9, host="h", here=_here(), pid=pid, start=started, record=fd)
        assert str(peer) == f"rank 1 (global rank 9, host h, pid {pid})"
        view = peer.open()
        assert view is not None
        assert process_state(pid, peer.start) == "running"
        assert [(p, r, str(at)) for p, r, at in places_here() if p == pid] == [
            (pid, 1, "in experts backward of layer layers.7, call 5")
        ]
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert process_state(pid, peer.start) == "stopped"
        assert process_state(pid, peer.start + 1) == "gone", "another process with the same number"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "read_text", no_descriptor)
            assert process_state(pid, peer.start) == peer.state() == "unknown"
    finally:
        os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process_state(pid, peer.start) == "gone", "a zombie is gone"
    os.waitpid(pid, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            start_of(pid)
    assert process_state(pid, peer.start) == "gone"
    assert start_of(pid) == 0
    place = view.place()
    assert str(place) == "in experts backward of layer layers.7, call 5"
    assert view.note() == "last words"
    assert peer.open() is None, "nothing is left behind"
