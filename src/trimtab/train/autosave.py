"""Checkpoints that nobody asked for, so that little is lost: one every half hour, and one where a signal ends the run.

The last of them is kept until a later checkpoint or the model is written. `--save-every` takes their place but at
signals; with 0 there are none. Importing this imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from trimtab.checkpoint import folder as on_disk
from trimtab.errors import InputError, free_room
from trimtab.processes import heard_by

EVERY = 1800.0
"""Seconds of training between two of them, and at least SHARE times what the last one took."""
SHARE = 20
MARK = "unasked"
"""In `Index.extra` of such a checkpoint."""
TWICE = 1.0
"""Seconds in which a second signal is taken for the first, come by another way."""


class Autosave:
    """When one is due. Each rank votes as a step ends; all act on the sums, and so alike.

    save_every: the option. needs: bytes that must be free for one, on the disk of `root`, those that the model will
    take among them. signals: that this rank has got. stop: True once the ranks have agreed to end.
    """

    def __init__(self, save_every: int | None, root: Path, needs: int) -> None:
        self.signals: list[int] = []
        self.stop = self.due = False
        self._every, self._root, self._needs = save_every, root, needs
        self._saved, self._took = time.monotonic(), 0.0

    def votes(self) -> tuple[bool, bool]:
        """This rank's: to stop, and to save."""
        late = time.monotonic() - self._saved > max(EVERY, SHARE * self._took)
        return bool(self.signals), self._every is None and late

    def agree(self, stop: bool, save: bool) -> None:
        """Take what the votes of all ranks come to."""
        self.stop, self.due = stop, save or (stop and self._every != 0)

    def has_room(self, step: int) -> bool:
        """Says it where there is none. One rank calls."""
        if (free := free_room(self._root)) >= self._needs:
            return True
        self.give_up(step, f"{self._needs / 1e6:,.1f} MB are needed with the model, {free / 1e6:,.1f} MB are free")
        return False

    def give_up(self, step: int, why: str) -> None:
        """Say that there is no checkpoint of a step, and remove what there is of one. One rank calls."""
        for folder in on_disk.unfinished_checkpoints(self._root):
            if folder.name.endswith(on_disk.UNFINISHED):
                on_disk.clear(folder)
        print(f"\ntrimtab: no checkpoint of step {step}: {why}", file=sys.stderr, flush=True)

    def saved(self, began: float) -> None:
        """A checkpoint, of whatever kind, has been written or tried since then, by `time.monotonic`."""
        self._saved = time.monotonic()
        self._took = self._saved - began


def remove_unasked(root: Path, before: float) -> None:
    """Remove such checkpoints of steps before that one."""
    for folder in on_disk.whole_checkpoints(root):
        with contextlib.suppress(InputError):  # damaged: not ours to judge
            if on_disk.step_of(folder) < before and on_disk.read_index(folder).extra.get(MARK):
                on_disk.remove(folder)


@contextlib.contextmanager
def first_signal_noted(came: list[int], heard: Callable[[int], object]) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP in the block goes into `came` and to `heard`, and the block goes on; the next
    does what it would do outside. See `heard_by`.

    Terminals and launchers send the same one twice: what comes within TWICE seconds of the first is that one.
    """
    began = 0.0
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal began
        if number == signal.SIGHUP:  # the terminal has gone, and writing there would be an error
            for stream in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if not came:
            began = time.monotonic()
            came.append(number)
            heard(number)
        elif time.monotonic() - began > TWICE:
            handler = before[number]
            signal.signal(number, handler)
            handler(number, frame) if callable(handler) else os.kill(os.getpid(), number)

    with heard_by(note) as before:
        yield
