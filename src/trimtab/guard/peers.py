"""Who the ranks of a group are (host, process), and what can be seen of those on this host without asking them."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from trimtab.guard.place import SlateView

_ENDED = "ZXx"
_STOPPED = "Tt"
_NOT_THERE = (FileNotFoundError, ProcessLookupError, PermissionError)


def _read(path: str) -> str:
    """Empty if nothing is there for this process to read. OSError if it lacks descriptors or memory to look."""
    try:
        return Path(path).read_text()
    except _NOT_THERE:
        return ""


@cache
def _here() -> str:
    """Names this host and its process numbers: equal only where one process can look at the other in /proc."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except _NOT_THERE:
        space = ""
    return f"{_read('/proc/sys/kernel/random/boot_id').strip()} {space}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty if there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def start_of(pid: int) -> int:
    """When a process began, in clock ticks: tells it from a later one with the same number. 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


@cache
def _own_start(pid: int) -> int:
    """`start_of` this process, whose number is pid: read once, for later there may be no descriptor to read it by."""
    return start_of(pid)


def process_state(pid: int, start: int) -> str:
    """running, stopped or gone; unknown if it lives and cannot be looked at: descriptors or memory are short."""
    try:
        fields = _stat(pid)
    except OSError:
        return _state_by_signal(pid)
    if not fields or fields[0] in _ENDED or int(fields[19]) != start:
        return "gone"
    return "stopped" if fields[0] in _STOPPED else "running"


def _state_by_signal(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "unknown"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One rank of the group. `here` and `fd` say where its record can be read; transport: the kind it exchanges by.

    left: the note of a record that nobody can have opened yet, once the rank has ended.
    """

    rank: int
    global_rank: int
    host: str
    here: str
    pid: int
    start: int
    fd: int
    transport: str = ""
    left: str = ""

    @classmethod
    def me(cls, rank: int, global_rank: int, fd: int, transport: str = "") -> Peer:
        """This process."""
        pid = os.getpid()
        return cls(
            rank=rank, global_rank=global_rank, host=socket.gethostname(), here=_here(), pid=pid,
            start=_own_start(pid), fd=fd, transport=transport,
        )  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Peer:
        return cls(**json.loads(text))

    @classmethod
    def absent(cls, rank: int, global_rank: int) -> Peer:
        """A rank that has not said who it is."""
        return cls(rank=rank, global_rank=global_rank, host="unknown", here="", pid=0, start=0, fd=-1)

    @property
    def is_absent(self) -> bool:
        return self.pid == 0

    def state(self) -> str:
        """As `process_state`; unknown on another host."""
        return process_state(self.pid, self.start) if self.fd >= 0 and self.here == _here() else "unknown"

    def open(self) -> SlateView | None:
        """Its record, if it is on this host and may be read."""
        if self.fd < 0 or self.here != _here():
            return None
        try:
            return SlateView.open(self.pid, self.fd, self.rank)
        except (OSError, ValueError):
            return None

    def __str__(self) -> str:
        world = [] if self.global_rank == self.rank else [f"global rank {self.global_rank}"]
        parts = world if self.is_absent else [*world, f"host {self.host}", f"pid {self.pid}"]
        return f"rank {self.rank} ({', '.join(parts)})" if parts else f"rank {self.rank}"
