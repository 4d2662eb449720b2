"""A contestant, and its processes seen from outside: started, asked, and ended by the race."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

Role = Literal["ours", "peer", "limit", "bandwidth"]

MALLOC = {
    "default": {},
    # Above these sizes glibc would map and unmap memory at each call, and every page would be touched anew.
    "tuned": {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**36)},
    # What is freed goes back at once, so that resident memory is memory in use.
    "strict": {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"},
}
"""Settings of glibc's malloc, read by a process when it starts."""
_MALLOC_NAMES = {name for settings in MALLOC.values() for name in settings} | {"GLIBC_TUNABLES", "LD_PRELOAD"}
_RANK_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}


class ContestantFailed(Exception):
    """A contestant cannot be built, raised, died or did not answer in time. The message is its row's reason."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Who races.

    name: unique within a race. group: what it is compared within (a workload), "" for what serves all groups.
    role: "limit" and "bandwidth" are what the others are measured against, see `benchmarks.result`.
    build: "module:function", a `benchmarks.subject.Build`. args: for it; plain values.
    rehearsal: args of the same thing in small, run before memory is measured.
    env: added to its environment. source: a folder that is first on its path, for another checkout of trimtab.
    """

    name: str
    role: Role
    build: str
    args: dict[str, Any] = field(default_factory=dict)
    rehearsal: dict[str, Any] | None = None
    group: str = ""
    ranks: int = 1
    threads: int = 1
    env: dict[str, str] = field(default_factory=dict)
    source: str = ""


class Team:
    """One process per rank of a contestant. A failure of one rank is the contestant's: all are ended."""

    def __init__(self, contestant: Contestant, malloc: str) -> None:
        self.contestant = contestant
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-bench-")
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(contestant.ranks):
            ours, theirs = Pipe()
            with self._log(rank).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "benchmarks.child", str(theirs.fileno())],
                    env=_environment(contestant, rank, malloc) | {"TMPDIR": self._folder.name},  # goes with it
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            theirs.close()
            ours.send((contestant, rank, str(Path(self._folder.name) / "store")))
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, command: tuple[Any, ...], patience: float) -> list[Any]:
        """Send a command to all ranks; their answers within `patience` seconds. Raises ContestantFailed."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(command)
            except OSError as error:
                raise ContestantFailed(f"ended unasked: {self._last_words(rank)}") from error
        return self.answers(patience)

    def answers(self, patience: float) -> list[Any]:
        """One answer of each rank within `patience` seconds. Raises ContestantFailed."""
        end = time.monotonic() + patience
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            for rank, pipe in enumerate(self._pipes):
                if rank in found or not pipe.poll(0.05 if len(self._pipes) > 1 else max(0.0, end - time.monotonic())):
                    continue
                try:
                    good, answer = pipe.recv()
                except (EOFError, ConnectionResetError) as error:
                    raise ContestantFailed(f"died: {self._last_words(rank)}") from error
                if not good:
                    raise ContestantFailed(answer)
                found[rank] = answer
            if len(found) < len(self._pipes) and time.monotonic() > end:
                raise ContestantFailed(f"no answer within {patience:.0f} s")
        return [found[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End the processes: asked to where they listen, killed where they do not."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the processes now."""
        for process in self._processes:
            process.kill()
        self.close()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"log-{rank}"

    def _last_words(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").strip().splitlines()
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(timeout=5)
        code = self._processes[rank].returncode
        return f"exit code {code}, {lines[-1] if lines else 'it said nothing'}"


def _environment(contestant: Contestant, rank: int, malloc: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _MALLOC_NAMES | _RANK_NAMES}
    if contestant.ranks > 1:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(contestant.ranks)}
    here = [path or os.getcwd() for path in sys.path]  # it finds what this process finds
    found = [contestant.source, *here] if contestant.source else here
    return env | MALLOC[malloc] | contestant.env | {
        "OMP_NUM_THREADS": str(contestant.threads),
        "MKL_NUM_THREADS": str(contestant.threads),
        "PYTHONPATH": os.pathsep.join(found),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
