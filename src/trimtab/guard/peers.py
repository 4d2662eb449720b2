"""The ranks of a group: their introductions at the start, and what can be seen of those on this host."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from trimtab.errors import first_line
from trimtab.guard.record import RankRecord

_NOT_THERE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, kw_only=True)
class PeerInfo:
    """Introduction of a rank through the group's store.

    here: equal on ranks that can look at each other in /proc. record, rows, control: descriptors of its `RankRecord`
    and of memory that it shares, or -1. transport: the kind it exchanges by. device: type of its tensors. lack: why it
    can't share memory. pid 0: it has not said who it is.
    """

    rank: int
    global_rank: int
    host: str = ""
    here: str = ""
    pid: int = 0
    start: int = 0
    record: int = -1
    transport: str = ""
    device: str = ""
    rows: int = -1
    control: int = -1
    lack: str = ""

    @property
    def is_local(self) -> bool:
        """True where it runs on this host, in the same container."""
        return self.here == _here()

    def state(self) -> str:
        """As `process_state`; unknown on another host."""
        return process_state(self.pid, self.start) if self.is_local else "unknown"

    def open(self) -> RankRecord | None:
        """Its record, if it is on this host and may be read."""
        if self.record < 0 or not self.is_local:
            return None
        try:
            return RankRecord.open(self.pid, self.record, self.rank)
        except (OSError, ValueError):
            return None

    def __str__(self) -> str:
        parts = [] if self.global_rank == self.rank else [f"global rank {self.global_rank}"]
        parts += [f"host {self.host}", f"pid {self.pid}"] if self.pid else []
        return f"rank {self.rank} ({', '.join(parts)})" if parts else f"rank {self.rank}"


class _Polled:
    """Waited for as `torch.distributed.Work` is, by asking `is_completed`, with pauses of at most `pause` seconds."""

    late, pause = "", 0.0
    is_completed: Callable[..., bool]

    def wait(self, timeout: timedelta) -> None:
        start, waited = time.monotonic(), 0.0
        while not self.is_completed():
            if waited > timeout.total_seconds():
                raise RuntimeError(self.late)
            time.sleep(min(waited / 4, self.pause))
            waited = time.monotonic() - start


class Arrival(_Polled):
    """A copy of a device's tensor in pinned memory, `values`, valid once the event recorded after it has completed. If
    a rank is lost, it never completes. Raises the device's own errors. It is asked without a pause, as CUDA does in
    `tensor.tolist()`: in a pause the device would run out of kernels."""

    late, pause = "the device has not reached the counts that the host reads", 0.0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.values = tensor.to("cpu", non_blocking=True)  # pinned
        self._event = torch.accelerator.current_stream(tensor.device).record_event()

    def is_completed(self) -> bool:
        return bool(self._event.query())


class Introductions(_Polled):
    """Introductions of the ranks of a group. Each speaks without waiting for the others, and reads later.

    Every rank of the group must make it, in the same order where there are several. what: names their kind.
    Can be waited for: until all ranks have spoken.
    """

    late, pause = "not all ranks have come to their first exchange", 0.02

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self.rank, self._world = dist.get_rank(group), dist.get_process_group_ranks(group)
        self._me = PeerInfo(
            rank=self.rank, global_rank=self._world[self.rank], host=socket.gethostname(), here=_here(),
            pid=os.getpid(), start=start_of(os.getpid()),  # now: shared memory may take the last descriptor
        )  # fmt: skip
        store = group.get_group_store()
        number = store.add(f"trimtab/{what}/{self.rank}", 1)
        self._store = dist.PrefixStore(f"trimtab/{what}/{number}", store)
        self._keys = [f"rank/{rank}" for rank in range(len(self._world))]
        self._failure = ""

    def say(self, **fields: int | str) -> None:
        """Introduce this rank; see `PeerInfo`."""
        self._store.set(self._keys[self.rank], json.dumps(asdict(self._me) | fields))

    def read(self) -> list[PeerInfo]:
        """Each rank's introduction, by rank; for those that have not spoken only who they are."""
        if self._store.check(self._keys):
            return [PeerInfo(**json.loads(text)) for text in self._store.multi_get(self._keys)]
        return [
            PeerInfo(**json.loads(self._store.get(key)))
            if self._store.check([key])
            else PeerInfo(rank=rank, global_rank=self._world[rank])
            for rank, key in enumerate(self._keys)
        ]

    def wait(self, timeout: timedelta) -> None:
        super().wait(timeout)
        if self._failure:
            raise RuntimeError(self._failure)

    def is_completed(self) -> bool:
        """True once all have spoken, or never will, for the store has failed."""
        try:
            return bool(self._store.check(self._keys))
        except RuntimeError as error:
            self._failure = first_line(error)
            return True


def has_gloo(group: dist.ProcessGroup) -> bool:
    """True where the host waits for this group's collectives on CPU tensors through Gloo."""
    return "cpu:gloo" in _backends(group)


def has_store(group: dist.ProcessGroup) -> bool:
    """True where the ranks of a group can introduce themselves."""
    return not {"mpi", "fake"} & {of.partition(":")[2] for of in _backends(group)}


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which this group's own collectives over Gloo or NCCL give up."""
    devices = [of.partition(":")[0] for of in ("cpu:gloo", "cuda:nccl") if of in _backends(group)]
    default = dist.default_pg_timeout.total_seconds()
    each = (group._get_backend(torch.device(device)).options._timeout.total_seconds() for device in devices)
    return min(each, default=default)


def _backends(group: dist.ProcessGroup) -> list[str]:
    return dist.get_backend_config(group).lower().split(",")


def process_state(pid: int, start: int) -> str:
    """running, stopped or gone; unknown if this process lacks descriptors or memory to look."""
    try:
        fields = _stat(pid)
    except OSError:
        return "unknown"
    if not fields or fields[0] in "ZXx" or int(fields[19]) != start:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def start_of(pid: int) -> int:
    """When a process began, in clock ticks: tells it from a later one with the same number. 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


@cache
def _here() -> str:
    """Names this host and its process numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except _NOT_THERE:
        space = ""
    return f"{_read('/proc/sys/kernel/random/boot_id').strip()} {space}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty if there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    """Empty if nothing is there for this process to read. OSError if it lacks descriptors or memory to look."""
    try:
        return Path(path).read_text()
    except _NOT_THERE:
        return ""
