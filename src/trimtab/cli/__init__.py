"""The `trimtab` command, and its progress on stderr: a line written over on a terminal, one now and then elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts `total` steps. `shown`: False on the ranks that stay silent."""

    def __init__(self, total: int, *, unit: str = "case", shown: bool = True) -> None:
        self.total, self.done, self.shown, self.unit = total, 0, shown, unit
        self._terminal, self._began = sys.stderr.isatty(), time.monotonic()

    def step(self, note: str = "", count: int = 1) -> None:
        """`count` more are done."""
        self.done += count
        if self.shown and (self._terminal or self.done % max(1, self.total // 20) == 0):
            left = (time.monotonic() - self._began) / max(1, self.done) * (self.total - self.done)
            text = f"{self.done} of {self.total} {self.unit}s, {left:.0f} s left {note}"
            self._print(text, "" if self._terminal else "\n")

    def say(self, text: str) -> None:
        """A message above the line."""
        if self.shown:
            self.close()
            print(text, flush=True)

    def close(self) -> None:
        """Take the line away."""
        if self.shown and self._terminal:
            self._print("", "")

    def _print(self, text: str, end: str) -> None:
        start = "\r\033[K" if self._terminal else ""
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)
