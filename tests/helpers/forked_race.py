"""Contestants of a race that are forked: what `benchmarks.child` does, without its start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

from benchmarks import child
from helpers.forks import start


class Forked:
    """What `benchmarks.contestant` asks of a `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str], pass_fds: Sequence[int], stdout: BinaryIO, **_: object
    ) -> None:
        pipe = Connection(os.dup(pass_fds[0]))
        self._process = start(_run, env, stdout.name, pipes=[pipe])
        pipe.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout or 60.0)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("benchmarks.child", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(env: dict[str, str], log: str, pipe: Connection) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.environ.clear()
    os.environ |= env
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv = ["benchmarks.child", str(pipe.fileno())]
    child.main()


def contestant(command: Sequence[str], env: dict[str, str], **more: Any) -> Any:
    """A fork; a process of its own for a contestant that finds other modules than this process does."""
    here = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return (Forked if env["PYTHONPATH"] == here else subprocess.Popen)(command, env=env, **more)


PROCESSES = SimpleNamespace(Popen=contestant, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
"""For `benchmarks.contestant.subprocess`. Settings of malloc come too late for a fork."""
