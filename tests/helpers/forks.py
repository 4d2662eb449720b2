"""Processes forked from a server of this session's own, which has imported all that earlier ones had to.

Each begins as a fresh process does, where nothing is that another one changed, started or left behind. It may start
others.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess, current_process
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from trimtab.verify.run import forkserver

LEARNT = ("torch", "transformers", "trimtab", "peft", "accelerate", "safetensors", "numpy", "datasets", "pyarrow")
"""Packages whose modules the server imports once one of its processes has: their import starts and changes nothing."""
NEVER = ("torch._inductor", "torch.testing")
"""But for these, which start processes or take their time."""

SERVER = "forks"
"""The name of the server, which lives as long as this process."""


class Fork:
    """A process that was started by `start`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """As a `multiprocessing.Process` has it: None while it runs, -N if signal N ended it."""
        if self._code is None:
            self._code = _ask("exitcode", self.pid)
        return self._code

    def join(self, timeout: float = 60.0) -> None:
        end, pause = time.monotonic() + timeout, 0.001
        while self.exitcode is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def kill(self) -> None:
        """End it, if it runs, and wait until it has."""
        if self._code is None:
            self._code = _ask("kill", self.pid)


def start(target: Callable[..., object], *args: Any, pipes: Sequence[Connection] = ()) -> Fork:
    """Call `target(*args, *pipes)`, a module-level function, in a process of its own; this process keeps `pipes` open.

    Raises AssertionError where the server cannot import the function.
    """
    return Fork(_ask("start", target, args, os.getcwd(), pipes=pipes))


class _Server:
    """The server, and orders to it, from one thread at a time."""

    def __init__(self) -> None:
        context = forkserver()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, name=SERVER, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *order: Any, pipes: Sequence[Connection]) -> tuple[bool, Any]:
        self._pipe.send_bytes(pickle.dumps(len(pipes)))
        self._pipe.send_bytes(pickle.dumps(order))
        for pipe in pipes:
            send_handle(self._pipe, pipe.fileno(), self._process.pid)
        answer: tuple[bool, Any] = self._pipe.recv()
        return answer


_server = functools.cache(_Server)
_TURN = threading.Lock()


def _ask(*order: Any, pipes: Sequence[Connection] = ()) -> Any:
    with _TURN:
        good, answer = _server().ask(*order, pipes=pipes)
    assert good, answer
    return answer


def _serve(pipe: Connection) -> None:
    """What the server runs until nobody can ask it any more."""
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # daemons start no processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    started: dict[int, BaseProcess] = {}
    with tempfile.NamedTemporaryFile("r") as learnt, suppress(EOFError):
        try:
            while True:
                number, order = pickle.loads(pipe.recv_bytes()), pipe.recv_bytes()
                handles = [recv_handle(pipe) for _ in range(number)]
                try:
                    pipe.send((True, _obey(started, learnt, handles, *pickle.loads(order))))
                except Exception:
                    pipe.send((False, traceback.format_exc()))
                for handle in handles:
                    os.close(handle)
        finally:
            for process in started.values():
                process.kill()


def _obey(started: dict[int, BaseProcess], learnt: Any, handles: list[int], what: str, *rest: Any) -> int | None:
    if what == "start":
        for name in dict.fromkeys(learnt.read().split()):
            if name not in sys.modules:
                with suppress(Exception):
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()  # or each process would copy it all when it collects for the first time
        process = get_context("fork").Process(target=_forked, args=(learnt.name, handles, *rest), daemon=False)
        process.start()
        assert process.pid is not None
        started[process.pid] = process
        return process.pid
    (pid,) = rest
    process = started[pid]
    if what == "kill":
        process.kill()
        process.join()
    return process.exitcode


def _forked(learnt: str, handles: list[int], target: Callable[..., object], args: tuple[Any, ...], folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    gc.enable()
    before = set(sys.modules)
    try:
        target(*args, *(Connection(os.dup(handle)) for handle in handles))
    finally:
        mine = [n for n in sys.modules if n not in before and n.split(".")[0] in LEARNT and not n.startswith(NEVER)]
        with open(learnt, "a") as file:
            file.write("".join(f"{name}\n" for name in mine))
