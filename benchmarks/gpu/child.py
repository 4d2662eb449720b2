"""The process of a stage that measures: `python -m benchmarks.gpu.child MODULE:FUNCTION DEVICE SECONDS FILE.json`.

What was found is in the file as soon as it is found. Just before the limit every thread says where it is.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trimtab.atomic_write import write_whole

SPARE = 10.0
"""Seconds before its limit at which a stage begins nothing new."""
BRIEF = 30.0
"""Milliseconds that a turn lasts at least."""


@dataclass(kw_only=True)
class Measuring:
    """What a stage's function gets; it returns its verdict, one line. data["wrong"]: numbers that are, in words."""

    device: str
    seconds: float
    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def on_cuda(self) -> bool:
        """False where the stage is rehearsed on the CPU: tiny sizes, and numbers that mean nothing."""
        return self.device == "cuda"

    def left(self) -> float:
        """Seconds in which something new may begin."""
        return self.seconds - min(SPARE, self.seconds / 4) - (time.monotonic() - self.began)

    def save(self, **found: Any) -> None:
        """Add to what was found, and write it."""
        self.data.update(found)
        write_whole(self.path, json.dumps(self.data, indent=1))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def turns(self, steps: dict[str, Callable[[], object]], turns: int = 7) -> dict[str, float]:
        """Name -> median of milliseconds a step, of turns A B C, C B A, …, each by CUDA events around as many steps as
        last `BRIEF`: what the device took, the host's launches included where it waits for them."""
        found: dict[str, list[float]] = {name: [] for name in steps}
        many = {}
        for name, step in steps.items():  # the second one is warm
            warm = [self._time(step, 1) for _ in range(2 if self.on_cuda else 1)][-1]
            many[name] = max(1, min(50, int(BRIEF / max(warm, 1e-3)))) if self.on_cuda else 1
        for turn in range(turns if self.on_cuda else 1):
            for name in steps if turn % 2 == 0 else reversed(list(steps)):
                found[name].append(self._time(steps[name], many[name]))
        return {name: median(each) for name, each in found.items()}

    def _time(self, step: Callable[[], object], times: int) -> float:
        if not self.on_cuda:
            start = time.perf_counter()
            for _ in range(times):
                step()
            return (time.perf_counter() - start) * 1e3 / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times


def main(argv: Sequence[str]) -> int:
    """Run one stage's function."""
    what, device, seconds, path = argv
    faulthandler.dump_traceback_later(max(0.5, float(seconds) - 1.5))
    run = Measuring(device=device, seconds=float(seconds), path=Path(path))
    run.save()
    module, _, name = what.partition(":")
    verdict = getattr(import_module(module), name)(run)
    run.save(verdict=verdict)
    print(verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
