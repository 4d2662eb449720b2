"""A progress bar on stderr: tqdm's, or a line now and then where tqdm is not installed."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Counts `total` steps. `shown`: False on the ranks that stay silent."""

    def __init__(self, total: int, *, unit: str = "case", shown: bool = True) -> None:
        self.total, self.done, self.shown, self.unit = total, 0, shown, unit
        self._bar: Any = None
        if shown:
            try:
                from tqdm import tqdm
            except ImportError:
                print(f"{total} {unit}s (with tqdm installed there is a progress bar)", file=sys.stderr, flush=True)
            else:
                self._bar = tqdm(total=total, unit=unit, dynamic_ncols=True, mininterval=0.5)

    def step(self, note: str = "", count: int = 1) -> None:
        """`count` more are done."""
        self.done += count
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif self.shown and self.done % max(1, self.total // 20) == 0:
            print(f"{self.done} of {self.total}, {note}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A message above the bar."""
        if self._bar is not None:
            self._bar.write(text)
        elif self.shown:
            print(text, flush=True)

    def close(self) -> None:
        """The bar stays as it is."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
