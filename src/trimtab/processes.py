"""Start, stop and end of a group's processes, under torchrun or as ranks of our own. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from trimtab.errors import ConfigError


def cores() -> int:
    """The number that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def group_size(nproc: int | None = None) -> int | None:
    """The number of ranks that a launcher such as torchrun started, of which this process is one; None if it is alone.

    Raises:
        ConfigError: `nproc` is given where ranks are started already; or the environment names a group in part, or one
            that cannot be: ranks would wait for ranks that are not.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys():
        return None
    if nproc is not None:
        raise ConfigError("--nproc starts ranks itself; leave it out under torchrun, which has started them")
    rank, size = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} in the environment is none of WORLD_SIZE={size} ranks; {_REMEDY}")
    for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 else ():
        if not os.environ.get(name):
            raise ConfigError(f"RANK and WORLD_SIZE={size} are in the environment, but not {name}; {_REMEDY}")
    return size


def module_arguments(name: str) -> list[str]:
    """Arguments for Python that run a module as a rank. It finds the modules that this process finds: the current
    directory is searched only if this one searches it."""
    here = {"", os.getcwd()} & set(sys.path)
    return [*([] if here else ["-P"]), "-m", name]


def leave_group() -> None:
    """Destroy the process group at the end of a program that has come to its end on every rank."""
    import torch.distributed as dist

    dist.destroy_process_group()
    end_behind_gloo()


def end_behind_gloo() -> None:
    """Let Gloo's threads be done with their last collectives before this process ends; asked again it does no more.

    Such a thread needs Python to free what it has sent: one that still waits for it when the interpreter ends aborts
    the process. What others have registered with atexit before this runs after it.
    """
    atexit.unregister(_let_gloo_end)
    atexit.register(_let_gloo_end)


def _let_gloo_end() -> None:
    time.sleep(0.05)


class Interrupted(BaseException):
    """A signal asked the run to stop. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def set_aside(_number: int, _frame: FrameType | None) -> None:
    """Handles a signal that a thread hears of, see `signals_told`."""


def signals_told() -> int:
    """A file descriptor that SIGTERM comes to as a byte, while Python's main thread waits inside a library too; it does
    nothing else to this process. Processes that this one forks or starts end by it as ever."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, set_aside)

    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is set_aside:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=in_child)
    return reader


@contextlib.contextmanager
def heard_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[dict[int, Any]]:
    """SIGINT, SIGTERM and SIGHUP come to `handler` inside the block; those that nohup or a shell set aside stay so, and
    all do in a thread where no handler can be set. Yields the handlers of before."""
    settable = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if settable else ()
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None, set_aside)]
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in heard}
    try:
        yield before
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Interrupted inside the block, see `heard_by`.

    What fails because of that, as a file that is cut off while it is written, does not take its place.
    """
    came: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        raise Interrupted(number)

    try:
        with heard_by(stop):
            yield
    except Exception as error:
        if came:
            raise Interrupted(came[0]) from error
        raise


_REMEDY = "start all ranks with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK"


def _integer(name: str) -> int:
    text = os.environ.get(name)
    if text is None:
        given = next(n for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if n in os.environ)
        raise ConfigError(f"{given} is in the environment, but not {name}; {_REMEDY}")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is no integer; {_REMEDY}") from None
