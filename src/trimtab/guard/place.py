"""Where a rank is: layer, phase, direction, call. Kept where the ranks of the same host can read it.

The record lies in memory that belongs to the process and is seen by others through /proc/<pid>/fd/<fd>. So it needs
no file to clean up, can be read while the process is stopped, and stays readable after it was killed by those who
have opened it before.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any

from trimtab.guard.memory import SIZE, create, open_readonly

PHASES = ("route", "count", "dispatch", "experts", "combine")
DIRECTIONS = ("forward", "backward")
STATES = ("in", "waiting in", "past")

NAME = "trimtab-place"
"""What /proc/<pid>/fd shows."""

_PLACE = struct.Struct("<4sQBBBBiqd120s")
"""Magic, version (odd while it is written), known, state, phase, direction, rank, call, since, layer."""
_OWNER, _NOTE = struct.Struct("<q"), struct.Struct("<I")
_STATE_AT, _OWNER_AT, _NOTE_AT = 13, 240, 256
_MAGIC = b"ttg1"


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place. `since`: seconds on the host's monotonic clock; `state`: one of `STATES`."""

    layer: str
    phase: str
    direction: str
    call: int
    state: str = "in"
    since: float = 0.0

    def __str__(self) -> str:
        of = f" of layer {self.layer}" if self.layer else ""
        return f"{self.state} {self.phase} {self.direction}{of}, call {self.call}"


class Slate:
    """The record of one process. `note` is text that outlives it: why this rank failed, or that it left."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._memory, self.fd = create(NAME)
        self._version = 0
        _OWNER.pack_into(self._memory, _OWNER_AT, os.getpid())
        _PLACE.pack_into(self._memory, 0, _MAGIC, 0, 0, 0, 0, 0, rank, 0, 0.0, b"")

    def write(self, layer: bytes, phase: int, direction: int, call: int, state: int) -> None:
        """Takes about a microsecond: it is called a dozen times in a layer's forward and backward."""
        self._version += 2
        since = time.monotonic()
        _PLACE.pack_into(
            self._memory, 0, _MAGIC, self._version - 1, 1, state, phase, direction, self.rank, call, since, layer
        )
        _PLACE.pack_into(
            self._memory, 0, _MAGIC, self._version, 1, state, phase, direction, self.rank, call, since, layer
        )

    def wait(self, waiting: bool) -> None:
        """Whether the rank waits for its peers at its place: one byte."""
        self._memory[_STATE_AT] = STATES.index("waiting in") if waiting else STATES.index("in")

    def write_note(self, note: str) -> None:
        """Leave a text. A later one replaces it."""
        data = note.encode()[: SIZE - _NOTE_AT - _NOTE.size]
        _NOTE.pack_into(self._memory, _NOTE_AT, 0)
        start = _NOTE_AT + _NOTE.size
        self._memory[start : start + len(data)] = data
        _NOTE.pack_into(self._memory, _NOTE_AT, len(data))

    def view(self) -> SlateView:
        """This process's own record, to be read."""
        return SlateView(self._memory)

    def close(self) -> None:
        """Give the memory back. Peers that have opened it can go on reading."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SlateView:
    """A record that is read. Raises OSError or ValueError where there is none."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    @classmethod
    def open(cls, pid: int, fd: int, rank: int | None = None) -> SlateView:
        """The record of a process of this host and user; `rank`: whose it must be."""
        view = cls(open_readonly(f"/proc/{pid}/fd/{fd}"))
        magic = bytes(view._memory[: len(_MAGIC)])
        if magic != _MAGIC or rank not in (None, view.rank()):
            raise ValueError(f"process {pid} does not hold the record of rank {rank}")
        return view

    def place(self) -> Place | None:
        """Where the rank was at its last sign of life; None before it began."""
        for _ in range(100):
            _, version, known, state, phase, direction, _, call, since, layer = _PLACE.unpack_from(self._memory, 0)
            if version % 2 == 0 and version == struct.unpack_from("<Q", self._memory, 4)[0]:
                break
        if not known:
            return None
        return Place(
            layer=layer.rstrip(b"\0").decode(errors="replace"),
            phase=PHASES[phase],
            direction=DIRECTIONS[direction],
            call=call,
            state=STATES[state],
            since=since,
        )

    def rank(self) -> int:
        """Whose record it is: the rank within the group."""
        rank: int = _PLACE.unpack_from(self._memory, 0)[6]
        return rank

    def owner(self) -> int:
        """The process that writes it. Others may hold it open: peers that read it, children that inherited it."""
        pid: int = _OWNER.unpack_from(self._memory, _OWNER_AT)[0]
        return pid

    def note(self) -> str:
        """What the rank left; empty if nothing."""
        (size,) = _NOTE.unpack_from(self._memory, _NOTE_AT)
        start = _NOTE_AT + _NOTE.size
        return bytes(self._memory[start : start + size]).decode(errors="replace")
