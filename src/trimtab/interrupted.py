"""A signal that asks a command to stop, as an exception: what ends processes and removes folders hears of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """A signal asked the run to stop. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Interrupted inside the block; those that nohup or a shell set aside stay so.

    What fails because of that, as a file that is cut off while it is written, does not take its place.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    except Exception as error:
        if came:
            raise Interrupted(came[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
