"""The place of a rank (layer, phase, direction, call), in memory without a file name that other processes of its host
can read through /proc/<pid>/fd/<fd>, also while it is stopped. `trimtab doctor --places` prints a host's records."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("route", "count", "dispatch", "experts", "combine")
DIRECTIONS = ("forward", "backward")
STATES = ("in", "waiting in", "past")
SIZE = 1 << 16
"""Bytes of a record: whole pages, which take memory where they are written."""

_NAME = "trimtab-record"
_PLACE = struct.Struct("<4sQBBBBiqd120s")
"""Magic, version (odd while it is written), known, state, phase, direction, rank, call, since, layer."""
_OWNER, _NOTE = struct.Struct("<q"), struct.Struct("<I")
_STATE_AT, _OWNER_AT, _NOTE_AT = 13, 240, 256
_MAGIC = b"ttg1"
_LAYER_BYTES = 120


def reserve(name: str, size: int) -> int:
    """The descriptor of `size` bytes that take no memory until they are written, and are gone with the last process
    that has them mapped; -1 where the system has none. OSError above `ulimit -f`."""
    if not hasattr(os, "memfd_create"):
        return -1
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_range(fd: int, size: int, offset: int = 0, *, writable: bool = True) -> Any:
    """`size` bytes from `offset` (a multiple of the page size), as a buffer; unmapped when nobody holds it any more.
    Python's `mmap` would keep a file descriptor for each mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memory


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place. `since`: seconds on the host's monotonic clock; `state`: one of `STATES`."""

    layer: str
    phase: str
    direction: str
    call: int
    state: str = "in"
    since: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since a rank of this host came there."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        of = f" of layer {self.layer}" if self.layer else ""
        return f"{self.state} {self.phase} {self.direction}{of}, call {self.call}"


class RankRecord:
    """The record of one process. rank: its rank within the group. owner: the process that writes it; peers and children
    may hold it open. fd: by which others find it; -1 where the system has none, and in a reader."""

    def __init__(self, memory: Any, fd: int = -1) -> None:
        self._memory, self.fd, self._version = memory, fd, 0
        self.rank: int = _PLACE.unpack_from(memory, 0)[6]
        self.owner: int = _OWNER.unpack_from(memory, _OWNER_AT)[0]

    @classmethod
    def create(cls, rank: int) -> RankRecord:
        """This process's own. rank: its rank within the group."""
        fd = reserve(_NAME, SIZE)
        memory = map_range(fd, SIZE) if fd >= 0 else mmap.mmap(-1, SIZE)
        _OWNER.pack_into(memory, _OWNER_AT, os.getpid())
        _PLACE.pack_into(memory, 0, _MAGIC, 0, 0, 0, 0, 0, rank, 0, 0.0, b"")
        return cls(memory, fd)

    @classmethod
    def open(cls, pid: int, fd: int, rank: int | None = None) -> RankRecord:
        """To read that of a process of this host. rank: whose it must be. OSError or ValueError where there is none."""
        path = f"/proc/{pid}/fd/{fd}"
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(opened).st_size != SIZE:
                raise OSError(f"{path} does not hold a record of {SIZE} bytes")
            record = cls(map_range(opened, SIZE, writable=False))
        finally:
            os.close(opened)
        if bytes(record._memory[: len(_MAGIC)]) != _MAGIC or rank not in (None, record.rank):
            raise ValueError(f"process {pid} does not hold the record of rank {rank}")
        return record

    def write(self, layer: str, phase: str, direction: str, call: int, state: str = "in") -> None:
        """The rank is there now. About two microseconds: called a dozen times in a layer's forward and backward."""
        known = (
            1, STATES.index(state), PHASES.index(phase), DIRECTIONS.index(direction), self.rank, call,
            time.monotonic(), layer.encode()[-_LAYER_BYTES:],
        )  # fmt: skip
        self._version += 2
        _PLACE.pack_into(self._memory, 0, _MAGIC, self._version - 1, *known)
        _PLACE.pack_into(self._memory, 0, _MAGIC, self._version, *known)

    def wait(self, waiting: bool) -> None:
        """Note that the rank waits for its peers at its place, or no longer: one byte."""
        self._memory[_STATE_AT] = int(waiting)

    def write_note(self, note: str) -> None:
        """Leave a text that outlives the process: why this rank failed, or that it left. A later one replaces it."""
        data = note.encode()[: SIZE - _NOTE_AT - _NOTE.size]
        _NOTE.pack_into(self._memory, _NOTE_AT, 0)
        start = _NOTE_AT + _NOTE.size
        self._memory[start : start + len(data)] = data
        _NOTE.pack_into(self._memory, _NOTE_AT, len(data))

    def close(self) -> None:
        """Give the memory back. Peers that have opened it can go on reading."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def place(self) -> Place | None:
        """The rank's place at its last sign of life; None before it began."""
        for _ in range(100):  # until it is not in the middle of being written
            _, version, known, state, phase, direction, _, call, since, layer = _PLACE.unpack_from(self._memory, 0)
            if version % 2 == 0 and version == struct.unpack_from("<Q", self._memory, 4)[0]:
                break
        if not known:
            return None
        return Place(
            layer=layer.rstrip(b"\0").decode(errors="replace"), phase=PHASES[phase], direction=DIRECTIONS[direction],
            call=call, state=STATES[state], since=since,
        )  # fmt: skip

    def note(self) -> str:
        """The text that the rank left; empty if none."""
        (size,) = _NOTE.unpack_from(self._memory, _NOTE_AT)
        start = _NOTE_AT + _NOTE.size
        return bytes(self._memory[start : start + size]).decode(errors="replace")


def places_here() -> Iterator[tuple[int, int, Place]]:
    """(pid, rank within its group, place) of each record of this host that holds a place, by pid: those of processes of
    the same user (root: all), one for each guard. They are sent nothing and need not answer."""
    for process in sorted((p for p in Path("/proc").iterdir() if p.name.isdigit()), key=lambda p: int(p.name)):
        pid, records = int(process.name), {}
        for link in _files(process):
            with suppress(OSError, ValueError):  # it has been closed meanwhile
                if link.readlink().name.startswith(f"memfd:{_NAME}"):
                    records[link.stat().st_ino] = RankRecord.open(pid, int(link.name))
        for _, record in sorted(records.items()):
            place = record.place()
            if place is not None and record.owner == pid:
                yield pid, record.rank, place


def _files(process: Path) -> list[Path]:
    """Links to what a process has open; none of one that has ended, or is another user's."""
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []
