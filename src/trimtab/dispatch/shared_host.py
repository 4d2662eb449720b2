"""Ranks of one host in shared memory: what each tells all, and the memory into which the others put its rows.

    control    one for the group, made by rank 0: a doorbell for each pair of ranks, and for each rank two boards,
               written in turn: its headers, at which meeting it is, and which slot of its arena takes the next rows
    arena      one for each rank: slots of rows, in a file without a name that takes memory only where it is written

A meeting is the only way in which ranks wait for each other: write to the own board, ring at every peer, wait until
every peer has rung here. A board is written again two meetings later: by then every peer has read it, for it has rung
for the meeting in between. A slot takes rows only after its owner has named it at a meeting, so nobody is in it. A
ring does not say for what: all compare at which meeting each is, and a rank that gives up writes so and rings.

Legend: P ranks, C columns of the header.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.introduction import Introductions, refuse_unshared, why_not_shared
from trimtab.dispatch.workspace import Slot, Workspace
from trimtab.errors import BackendError, DesyncError, TrimtabError
from trimtab.guard.doorbell import STRIDE, Doorbells
from trimtab.guard.memory import map_range, reserve
from trimtab.guard.peers import Peer

SLOT_BYTES = 1 << 36
"""Addresses of a slot. It takes memory only as far as it is written."""
MAX_COLUMNS = 32
_ARENA_BYTES = 1 << 52
_SLOTS = _ARENA_BYTES // SLOT_BYTES
_GIVEN_UP = -1
_PAGE = 4096
_SPIN = 50e-6
"""Seconds of looking at the doorbells before sleeping at them, where every rank has a core."""


class HostMemory:
    """One rank's side: `introduce`, wait for the others' `introductions`, `open`, wait until all have `reached` each
    other, `agree`, and only then the rest.

    group: the ranks. Raises BackendError where this system has no shared memory of the kind.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._pid = os.getpid()
        try:
            self.introductions, self.reached = Introductions(group, "shared"), Introductions(group, "reached")
            self._arena = reserve("trimtab-rows", _ARENA_BYTES)
            self._control = reserve("trimtab-control", self._control_bytes()) if self.rank == 0 else -1
        except OSError as error:
            raise BackendError(f"no shared memory: {error}; look at `ulimit -f -n`", rank=self.rank) from error
        if self._arena < 0:
            raise BackendError("shared memory between ranks needs Linux: use another transport", rank=self.rank)
        self._fds = [fd for fd in (self._arena, self._control) if fd >= 0]
        self._close = weakref.finalize(self, _close, self._fds)
        if self.rank == 0:
            self._map_control(self._control).begin()
        self.workspace = Workspace(partial(_mapped, self._arena))
        self.inbox: Slot = self.workspace.take(0)
        self.peers: dict[int, Peer] = {}
        self._peer_fds: dict[int, int] = {}
        self._reached: dict[tuple[int, int], Tensor] = {}
        self._turn, self._meeting = 0, -1
        self._spin = _SPIN if self.size <= len(os.sched_getaffinity(0)) else 0.0

    def introduce(self, device: torch.device) -> None:
        """Tell the others where this rank's memory is. device: of the tensors that it brings."""
        self.introductions.say(device.type, self._arena, self._control)

    def open(self) -> None:
        """Map what the others share, once they have all introduced themselves, and tell them whether it could be.

        Raises ConfigError, on every rank: they are on several hosts, or bring tensors of a device.
        """
        cards = self.introductions.read()
        refuse_unshared(cards)
        lack = ""
        try:
            for card in cards:
                if card.peer.rank != self.rank:
                    self.peers[card.peer.rank] = card.peer
                    self._peer_fds[card.peer.rank] = fd = self._open(card.peer, card.peer.fd, "trimtab-rows")
                    _mapped(fd, 0, _PAGE)
            if self.rank != 0:
                self._map_control(self._open(cards[0].peer, cards[0].control, "trimtab-control"))
        except OSError as error:
            lack = f"rank {self.rank} cannot open what its peers share: {error}"
        self.reached.say(cards[self.rank].device, lack=lack)

    def agree(self) -> None:
        """Raise BackendError, on every rank, if one of them could not open another's memory."""
        cards = self.reached.read()
        if lack := why_not_shared(cards):
            raise BackendError(
                f"{lack}. The ranks must run as one user, with descriptors enough (ulimit -n), and see each other in "
                "/proc; use the transport alltoall where they do not",
                ranks=tuple(card.peer.rank for card in cards if card.lack),
            )

    def check(self) -> None:
        """Raise BackendError in a process that is not the rank: a forked child has the same memory."""
        if os.getpid() != self._pid:
            raise BackendError("a forked child takes part in no exchange of its parent", rank=self.rank)

    def headers(self, columns: int) -> Tensor:
        """What the ranks wrote at this turn, [P, P, C]: row s holds rank s's headers for each rank."""
        return self._boards[self._turn % 2, :, 1:, :columns]

    def arrive(self, next_inbox: Slot, *, rows: bool) -> Arrivals:
        """Show this turn's board, with the slot that takes the next rows, and ring at every peer. rows: whether the
        ranks meet for rows, and not for headers."""
        self._meeting = 2 * self._turn + rows
        self._boards[self._turn % 2, self.rank, 0, 0] = self._meeting * _SLOTS + next_inbox.number
        self.inbox = next_inbox
        self._ring()
        return Arrivals(self, self._bells)

    def turn(self) -> None:
        """All have met: go on to the other board.

        Raises DesyncError if not all are at this meeting, on every rank; BackendError if one has given up.
        """
        self._words = self._boards[self._turn % 2, :, 0, 0].tolist()
        if min(self._words) // _SLOTS != self._meeting or max(self._words) // _SLOTS != self._meeting:
            raise self._elsewhere([word // _SLOTS for word in self._words])
        self._turn += 1

    def give_up(self) -> None:
        """Let every peer know, where this rank would have met it next, that it does not come."""
        self._boards[(self._meeting // 2 + 1) % 2, self.rank, 0, 0] = _GIVEN_UP  # at the last one all see the same
        self._ring()

    def _ring(self) -> None:
        for rank in self.peers:
            self._bells.ring(rank * self.size + self.rank)

    def _elsewhere(self, meetings: list[int]) -> TrimtabError:
        """Who is at another meeting than this rank. meetings: each rank's."""
        given_up = tuple(rank for rank, meeting in enumerate(meetings) if meeting == _GIVEN_UP)
        if given_up:
            return BackendError(
                f"rank {', '.join(map(str, given_up))} gave up this shared memory after an error, which it raised: "
                "build new transports on all ranks",
                ranks=given_up,
            )
        each = (f"rank {r} at meeting {m // 2}, for {('headers', 'rows')[m % 2]}" for r, m in enumerate(meetings))
        return DesyncError(
            f"the ranks are in different exchanges: {'; '.join(each)}. One of them left a call in the middle, as after "
            "an error that was caught there: all ranks must make the same calls. Build new transports on all ranks",
            ranks=tuple(rank for rank, meeting in enumerate(meetings) if meeting != self._meeting),
        )

    def inbox_of(self, rank: int, size: int) -> Tensor:
        """The memory that takes the next rows for a rank: [size] uint8."""
        if rank == self.rank:
            return self.inbox.bytes(size)
        key = (rank, self._words[rank] % _SLOTS)
        if key not in self._reached or self._reached[key].shape[0] < size:
            self._reached[key] = _mapped(self._peer_fds[rank], key[1], max(_PAGE, 1 << (size - 1).bit_length()))
        return self._reached[key][:size]

    def _control_bytes(self) -> int:
        words = 2 * self.size * (1 + self.size) * MAX_COLUMNS
        return -(-(self.size * self.size * STRIDE + 8 * words) // _PAGE) * _PAGE

    def _map_control(self, fd: int) -> Doorbells:
        memory, bells = map_range(fd, self._control_bytes()), self.size * self.size
        start = ctypes.addressof(memory)
        self._bells = Doorbells(memory, [start + STRIDE * i for i in range(bells)])
        with torch.inference_mode(False):
            words = torch.frombuffer(memory, dtype=torch.int64, offset=STRIDE * bells)
            shape = (2, self.size, 1 + self.size, MAX_COLUMNS)
            self._boards = words[: 2 * self.size * (1 + self.size) * MAX_COLUMNS].view(shape)
        return self._bells

    def _open(self, peer: Peer, fd: int, name: str) -> int:
        path = f"/proc/{peer.pid}/fd/{fd}"
        if not os.readlink(path).startswith(f"/memfd:{name}"):
            raise OSError(f"{path} of {peer} is not {name}")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._fds.append(opened)
        return opened


class Arrivals:
    """Waits until every peer has rung. Ends with an error when one cannot any more, for its process is gone."""

    def __init__(self, host: HostMemory, bells: Doorbells) -> None:
        self.missing = dict(host.peers)
        self._spin, self._first, self._bells = host._spin, host.rank * host.size, bells
        self.gone: tuple[int, ...] = ()

    def wait(self, timeout: timedelta) -> None:
        now = time.monotonic()
        end, spin = now + timeout.total_seconds(), now + self._spin
        while self.missing and time.monotonic() < spin:
            self._look()
        self._spin = 0.0
        while self.missing:
            rank = next(iter(self.missing))
            if self._bells.wait(self._first + rank, max(0.0, end - time.monotonic())):
                del self.missing[rank]
            else:
                self._raise_if_missing()

    def is_completed(self) -> bool:
        return not self.missing or bool(self.gone)

    def _look(self) -> None:
        for rank in [rank for rank in self.missing if self._bells.rung(self._first + rank)]:
            del self.missing[rank]

    def _raise_if_missing(self) -> None:
        gone = [rank for rank, peer in self.missing.items() if peer.state() == "gone"]
        self._look()  # it may have rung before it ended
        self.gone = tuple(rank for rank in gone if rank in self.missing)
        if self.gone:
            raise RuntimeError(f"the process of {', '.join(f'rank {rank}' for rank in self.gone)} has ended")
        if self.missing:
            raise RuntimeError(f"ranks {', '.join(map(str, self.missing))} have not come")


def _mapped(fd: int, number: int, size: int) -> Tensor:
    return torch.frombuffer(map_range(fd, size, number * SLOT_BYTES), dtype=torch.uint8)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
