"""Contestants of one process on one device, in turns: each round runs every one once, several times in a row.

A GPU is timed by its own events, so that what the host does between launches counts only where the device waits for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Run = Callable[[], object]


class Graph(Protocol):
    """What `torch.cuda.CUDAGraph` has."""

    def replay(self) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A CUDA graph as a run.

    kept: what the captured run gave. pool: bytes that the graph holds from its capture on; a replay allocates nothing.
    """

    graph: Graph
    kept: object
    pool: int

    def __call__(self) -> object:
        self.graph.replay()
        return self.kept


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of one contestant.

    seconds: each round's, per run. memory: the most bytes of a run beyond what was held before, its results included;
    those of its pool where it is a graph. None where that was not measured.
    """

    seconds: tuple[float, ...]
    memory: int | None
    is_graph: bool = False

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """The middle half of the rounds, over the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return f"{low / self.median:.2f}-{high / self.median:.2f}"


def time_of(run: Run, device: torch.device, repeats: int) -> float:
    """Seconds per run."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats
    start_event, end_event = (_event() for _ in range(2))
    start_event.record()
    for _ in range(repeats):
        run()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event)) * 1e-3 / repeats


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def memory_of(run: Run, device: torch.device) -> int | None:
    """See `Timing`."""
    if isinstance(run, Replay):
        return run.pool
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def race(
    contestants: Mapping[str, Run], device: torch.device, *, rounds: int = 11, seconds: float = 0.03
) -> dict[str, Timing]:
    """Medians need rounds, not repeats: each round repeats a contestant for about `seconds`."""
    repeats, memory = {}, {}
    for name, run in contestants.items():
        for _ in range(3):  # compile, fill caches, reach the clock rate
            run()
        memory[name] = memory_of(run, device)
        repeats[name] = max(1, int(seconds / max(time_of(run, device, 1), 1e-9)))
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds):
        order = list(contestants) if turn % 2 else list(contestants)[::-1]
        for name in order:
            found[name].append(time_of(contestants[name], device, repeats[name]))
    return {
        name: Timing(seconds=tuple(found[name]), memory=memory[name], is_graph=isinstance(run, Replay))
        for name, run in contestants.items()
    }
