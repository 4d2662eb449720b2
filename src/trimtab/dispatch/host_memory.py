"""Ranks of one host in shared memory: a control block of the group with a doorbell for each pair of ranks and two
boards for each rank, and an arena of each rank, slots into which the others put its rows.

Ranks wait for each other at meetings alone: write to the own board, ring at every peer, wait until every peer has rung
here. A board is written again two meetings later, when every peer has read it; a slot takes rows only after its owner
has named it at a meeting. A ring does not say for what: all compare at which meeting each is.

Legend: P ranks, C columns of the message.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.doorbells import STRIDE, Arrivals, Doorbells
from trimtab.errors import BackendError, ConfigError, DesyncError, TrimtabError
from trimtab.guard.guard import Waiting
from trimtab.guard.peers import Introductions, PeerInfo
from trimtab.guard.record import map_range, reserve
from trimtab.processes import cores

SLOT_BYTES = 1 << 36
"""Addresses of a slot. It takes memory only as far as it is written."""
SMALLEST = 1 << 16
MAX_COLUMNS = 32
LIMITS = "look at `ulimit -f -n`, or use the transport alltoall"
_ARENA_BYTES = 1 << 52
_SLOTS = _ARENA_BYTES // SLOT_BYTES
_GIVEN_UP = -1
_PAGE = 4096
_SPIN = 50e-6
"""Seconds of looking at the doorbells before sleeping at them, where every rank has a core."""


class HostMemory:
    """One rank's side. lack: why this rank has no shared memory; empty if it has."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._fds, self.lack = list[int](), ""
        self._close = weakref.finalize(self, _close, self._fds)
        self._introductions, self._opened = Introductions(group, "shared"), Introductions(group, "opened")
        self._arena = self._reserve("trimtab-rows", _ARENA_BYTES)
        self._control = self._reserve("trimtab-control", self._control_bytes()) if self.rank == 0 else -1
        self._slots: list[Slot] = []
        self.peers: dict[int, PeerInfo] = {}
        self._peer_fds: dict[int, int] = {}
        self._reached: dict[tuple[int, int], Tensor] = {}
        self._turn, self._meeting = 0, -1
        self._spin = _SPIN if self.size <= cores() else 0.0

    def meet(self, device: torch.device, wait: Callable[[Waiting], None]) -> None:
        """Map what the others share. Collective, once, before the rest. device: of the tensors that this rank brings.

        Raises, on every rank:
            ConfigError: they are on several hosts, or bring tensors of a device.
            BackendError: one of them has no shared memory of the kind, or cannot open another's.
        """
        if self._control >= 0:
            self._map_control(self._control).begin()
        self._introductions.say(device=device.type, rows=self._arena, control=self._control, lack=self.lack)
        wait(self._introductions)
        infos = self._introductions.read()
        if reason := why_not_shared(infos):
            message = f"shared memory can't carry the rows: {reason}. Use the transport alltoall"
            raise ConfigError(message, phase="count")
        _refuse_lacking(infos, LIMITS)
        self.inbox = self.take(0)
        try:
            for peer in infos:
                if peer.rank != self.rank:
                    self.peers[peer.rank] = peer
                    self._peer_fds[peer.rank] = fd = self._open(peer, peer.rows, "trimtab-rows")
                    _mapped(fd, 0, _PAGE)
            if self.rank != 0:
                self._map_control(self._open(infos[0], infos[0].control, "trimtab-control"))
        except OSError as error:
            self.lack = f"rank {self.rank} cannot open what its peers share: {error}"
        self._opened.say(lack=self.lack)
        wait(self._opened)
        _refuse_lacking(
            self._opened.read(),
            "the ranks must run as one user, with descriptors enough (ulimit -n), and see each other in /proc; use the "
            "transport alltoall where they do not",
        )

    def messages(self, columns: int) -> Tensor:
        """Messages of this turn, [P, P, C]: row s holds rank s's message for each rank."""
        return self._boards[self._turn % 2, :, 1:, :columns]

    def arrive(self, next_inbox: Slot, *, rows: bool) -> Arrivals:
        """Show this turn's board, with the slot that takes the next rows, and ring at every peer. rows: whether the
        ranks meet for rows, and not for counts."""
        self._meeting = 2 * self._turn + rows
        self._boards[self._turn % 2, self.rank, 0, 0] = self._meeting * _SLOTS + next_inbox.number
        self.inbox = next_inbox
        self._ring()
        return Arrivals(self.peers, self._bells, self.rank * self.size, self._spin)

    def turn(self) -> None:
        """All have met: go on to the other board. Raises, on every rank, DesyncError if not all are at this meeting,
        BackendError if one has given up."""
        self._words = self._boards[self._turn % 2, :, 0, 0].tolist()
        if min(self._words) // _SLOTS != self._meeting or max(self._words) // _SLOTS != self._meeting:
            raise self._elsewhere([word // _SLOTS for word in self._words])
        self._turn += 1

    def give_up(self) -> None:
        """Let every peer know, where this rank would have met it next, that it does not come."""
        self._boards[(self._meeting // 2 + 1) % 2, self.rank, 0, 0] = _GIVEN_UP  # at the last one all see the same
        self._ring()

    def take(self, size: int, *, besides: Slot | None = None) -> Slot:
        """A free slot of this rank's arena, not `besides`: the smallest of `size` bytes, else the largest, to grow."""
        free = [slot for slot in self._slots if slot is not besides and slot.free]
        if enough := [slot for slot in free if slot.size >= size]:
            return min(enough, key=lambda slot: slot.size)
        if free:
            return max(free, key=lambda slot: slot.size)
        self._slots.append(Slot(self._arena, len(self._slots)))
        return self._slots[-1]

    def inbox_of(self, rank: int, size: int) -> Tensor:
        """The memory that takes the next rows for a rank: [size] uint8."""
        if rank == self.rank:
            return self.inbox.bytes(size)
        key = (rank, self._words[rank] % _SLOTS)
        if key not in self._reached or self._reached[key].shape[0] < size:
            self._reached[key] = _mapped(self._peer_fds[rank], key[1], max(_PAGE, 1 << (size - 1).bit_length()))
        return self._reached[key][:size]

    def _ring(self) -> None:
        for rank in self.peers:
            self._bells.ring(rank * self.size + self.rank)

    def _elsewhere(self, meetings: list[int]) -> TrimtabError:
        """The error that names the ranks at another meeting than this one. meetings: each rank's."""
        given_up = tuple(rank for rank, meeting in enumerate(meetings) if meeting == _GIVEN_UP)
        if given_up:
            return BackendError(
                f"rank {', '.join(map(str, given_up))} gave up this shared memory after an error, which it raised: "
                "build new transports on all ranks",
                ranks=given_up,
            )
        each = (f"rank {r} at meeting {m // 2}, for {('counts', 'rows')[m % 2]}" for r, m in enumerate(meetings))
        return DesyncError(
            f"the ranks are in different exchanges: {'; '.join(each)}. One of them left a call in the middle, as after "
            "an error that was caught there: all ranks must make the same calls. Build new transports on all ranks",
            ranks=tuple(rank for rank, meeting in enumerate(meetings) if meeting != self._meeting),
        )

    def _reserve(self, name: str, size: int) -> int:
        try:
            fd = reserve(name, size)
            self.lack = self.lack if fd >= 0 else f"rank {self.rank} is not on Linux"
        except OSError as error:
            fd, self.lack = -1, f"no shared memory on rank {self.rank}: {error}"
        self._fds += [fd] if fd >= 0 else []
        return fd

    def _control_bytes(self) -> int:
        words = 2 * self.size * (1 + self.size) * MAX_COLUMNS
        return -(-(self.size * self.size * STRIDE + 8 * words) // _PAGE) * _PAGE

    def _map_control(self, fd: int) -> Doorbells:
        memory, bells = map_range(fd, self._control_bytes()), self.size * self.size
        self._bells = Doorbells(memory, bells)
        with torch.inference_mode(False):
            words = torch.frombuffer(memory, dtype=torch.int64, offset=STRIDE * bells)
            shape = torch.Size((2, self.size, 1 + self.size, MAX_COLUMNS))
            self._boards = words[: shape.numel()].view(shape)
        return self._bells

    def _open(self, peer: PeerInfo, fd: int, name: str) -> int:
        path = f"/proc/{peer.pid}/fd/{fd}"
        if not os.readlink(path).startswith(f"/memfd:{name}"):
            raise OSError(f"{path} of {peer} is not {name}")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._fds.append(opened)
        return opened


class Slot:
    """A piece of a rank's arena. It grows to powers of two, and is free when no tensor lies in it."""

    def __init__(self, arena: int, number: int) -> None:
        self.number, self.size = number, SMALLEST
        self._arena, self._memory = arena, map_range(arena, SMALLEST, number * SLOT_BYTES)
        self._lease: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        return self._lease is None or self._lease() is None

    def bytes(self, size: int) -> Tensor:
        """Its first bytes, [size] uint8; the slot is in use for as long as they or a view of them live."""
        if size > self.size:
            self.size = 1 << (size - 1).bit_length()
            self._memory = map_range(self._arena, self.size, self.number * SLOT_BYTES)
        lease = memoryview(self._memory)
        self._lease = weakref.ref(lease)
        return _as_tensor(lease)[:size]


def why_not_shared(infos: Sequence[PeerInfo]) -> str:
    """The reason why these ranks can't exchange rows through memory; empty if they can. The same on every rank."""
    devices = {info.device for info in infos}
    if devices != {"cpu"}:
        return f"the tensors are on {', '.join(sorted(devices))}, and only those of the CPU can be shared"
    places: dict[str, list[PeerInfo]] = {}
    for info in infos:
        places.setdefault(info.here, []).append(info)
    if len(places) > 1:
        groups = (f"{p[0].host}: ranks {', '.join(str(info.rank) for info in p)}" for p in places.values())
        return f"the ranks are on {len(places)} hosts or in as many containers ({'; '.join(groups)})"
    return ""


def _refuse_lacking(infos: Sequence[PeerInfo], advice: str) -> None:
    lacking = [info for info in infos if info.lack]
    if lacking:
        ranks = tuple(info.rank for info in lacking)
        raise BackendError(f"{'; '.join(info.lack for info in lacking)}; {advice}", ranks=ranks)


def _mapped(fd: int, number: int, size: int) -> Tensor:
    return _as_tensor(map_range(fd, size, number * SLOT_BYTES))


def _as_tensor(memory: Any) -> Tensor:
    with torch.inference_mode(False):  # what evaluation has used, training uses again
        return torch.frombuffer(memory, dtype=torch.uint8)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
