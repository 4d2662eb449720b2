"""Contestants of one process on one device, in turns: each round runs every one once, several times in a row.

A GPU is timed by its own events, so that what the host does between launches counts only where the device waits for it.
"""

from __future__ import annotations

import statistics
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
Run = Callable[[], object]


class Graph(Protocol):
    """What `torch.cuda.CUDAGraph` has."""

    def replay(self) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Replay(Generic[T]):
    """A CUDA graph as a run.

    kept: what the captured run gave. pool: bytes that the graph holds from its capture on; a replay allocates nothing.
    """

    graph: Graph
    kept: T
    pool: int

    def __call__(self) -> T:
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


@dataclass(frozen=True, kw_only=True)
class Raced:
    """timings: of those that ran. failed: why, of those that did not."""

    timings: dict[str, Timing]
    failed: dict[str, str]


def told(error: Exception) -> str:
    """An error as a cell of a table or a line. Prints its traceback as well, which names the last calls alone."""
    traceback.print_exception(error, limit=-4)
    return textwrap.shorten(f"{type(error).__name__}: {error}".replace("`", "'").replace("|", "/"), 300)


def race(
    contestants: Mapping[str, Run], device: torch.device, *, rounds: int = 11, seconds: float = 0.03
) -> Raced:  # fmt: skip
    """Medians need rounds, not repeats: each round repeats a contestant for about `seconds`.

    Who raises takes no more turns and is not timed.
    """
    repeats, memory, failed = dict[str, int](), dict[str, int | None](), dict[str, str]()
    for name, run in contestants.items():
        try:
            for _ in range(3):  # compile, fill caches, reach the clock rate
                run()
            memory[name] = memory_of(run, device)
            repeats[name] = max(1, int(seconds / max(time_of(run, device, 1), 1e-9)))
        except Exception as error:  # whatever a device throws
            failed[name] = told(error)
    found: dict[str, list[float]] = {name: [] for name in repeats}
    for turn in range(rounds):
        order = list(found) if turn % 2 else list(found)[::-1]
        for name in order:
            try:
                found[name].append(time_of(contestants[name], device, repeats[name]))
            except Exception as error:
                failed[name] = told(error)
                del found[name]
    timings = {
        name: Timing(seconds=tuple(times), memory=memory[name], is_graph=isinstance(contestants[name], Replay))
        for name, times in found.items()
    }
    return Raced(timings=timings, failed=failed)
