"""What is waited for in slices, so that the thread that waits stays in charge; and waiting for it without a guard."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from trimtab.errors import PeerLost, PhaseTimeout

SLICE = timedelta(milliseconds=100)


class Waiting(Protocol):
    """A collective in flight, as `torch.distributed.Work` is one."""

    def wait(self, timeout: timedelta) -> object:
        """Return when it is done; RuntimeError if it failed, or is not done within `timeout`."""
        ...

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        ...


def wait_alone(work: Waiting, timeout: float) -> None:
    """Wait without a guard, `timeout` seconds. Ranks are named if `work` names them: `gone`, and `missing`.

    Raises:
        PeerLost: it failed. PhaseTimeout: it took longer.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            work.wait(SLICE)
            return
        except RuntimeError as error:
            missing = tuple(getattr(work, "missing", ()))
            if work.is_completed():
                with suppress(RuntimeError):  # it may have come just after the slice
                    work.wait(SLICE)
                    return
                raise PeerLost(f"{error}", ranks=getattr(work, "gone", missing)) from None
            if time.monotonic() > end:
                raise PhaseTimeout(f"{error} within {timeout:g} s", ranks=missing) from None
