"""A contestant's process: `python -m benchmarks.child FD` builds it and answers what it is asked over FD.

    ("time", mode, steps)   seconds of each step, and of the parts that it times itself
    ("outcome",)            what is judged, saved
    ("memory", mode)        bytes of one step
    ("peak",)               the most bytes that the process held since it was built

Ranks meet at a barrier before each step, outside what is timed. The environment says how many threads there are; once
built, a rank stays on as many cores. PyTorch is imported by the contestant, if it is.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from benchmarks import memory
from benchmarks.contestant import Contestant
from benchmarks.result import ABSENT
from benchmarks.subject import Build, Subject, Where

if TYPE_CHECKING:
    from torch import Tensor


def main() -> None:
    """Answer until the other end closes."""
    pipe = Connection(int(sys.argv[1]))
    contestant, rank, store = pipe.recv()
    try:
        meet = _join(contestant, rank, store)
        subject = _build(contestant, rank)
        _stay(contestant, rank)
        memory.forget_peak()
        pipe.send((True, {"modes": list(subject.modes), "judged": subject.judged, **subject.facts}))
        while True:
            try:
                command = pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            pipe.send((True, _answer(contestant, rank, subject, command, meet)))
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or ["no message"]
        what = ABSENT if isinstance(error, ImportError) else type(error).__name__
        pipe.send((False, f"{what}: {lines[0]}"))
    sys.stderr.flush()
    os._exit(0)  # nothing to take apart: dozens of processes that do so at once would keep the cores busy


def _join(contestant: Contestant, rank: int, store: str) -> Callable[[], object]:
    """Where there are several ranks, meet them; returns how to meet them again."""
    if contestant.ranks == 1:
        return lambda: None
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=contestant.ranks)
    return dist.barrier


def _build(contestant: Contestant, rank: int) -> Subject:
    module, _, function = contestant.build.partition(":")
    build: Build = getattr(importlib.import_module(module), function)
    return build(contestant.args, Where(rank=rank, ranks=contestant.ranks))


def _stay(contestant: Contestant, rank: int) -> None:
    """On cores of this rank's own, the same for every contestant: where neighbors share a machine, cores differ."""
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, cores_of(contestant, rank, sorted(os.sched_getaffinity(0))))


def cores_of(contestant: Contestant, rank: int, cores: Sequence[int]) -> set[int]:
    """As many of these cores as a rank has threads, its neighbors' next to them; then from the first again."""
    first, threads = rank * contestant.threads, min(contestant.threads, len(cores))
    return {cores[(first + thread) % len(cores)] for thread in range(threads)}


def _answer(
    contestant: Contestant, rank: int, subject: Subject, command: tuple[Any, ...], meet: Callable[[], object]
) -> Any:
    match command:
        case ("time", str(mode), int(steps)):
            return _seconds(subject, mode, steps, meet)
        case ("outcome",):
            return None if subject.outcome is None else _saved(subject.outcome())
        case ("memory", str(mode)):
            if contestant.rehearsal is not None:  # what is loaded at first use is no memory of the step
                _build(replace(contestant, args=contestant.rehearsal), rank).modes[mode]()
            return memory.step_bytes(subject, mode)
        case ("peak",):
            return memory.peak()
    raise AssertionError(f"no such command: {command}")


def _saved(outcome: dict[str, Tensor]) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    return buffer.getvalue()


def _seconds(subject: Subject, mode: str, steps: int, meet: Callable[[], object]) -> dict[str, list[float]]:
    """Of each step, under the mode's name; of its parts under theirs."""
    taken: dict[str, list[float]] = {mode: []}
    for _ in range(steps):
        meet()
        start = time.perf_counter()
        parts = subject.modes[mode]()
        taken[mode].append(time.perf_counter() - start)
        for part, seconds in parts.items() if isinstance(parts, dict) else ():
            taken.setdefault(part, []).append(seconds)
    time.sleep(subject.rest)
    return taken


if __name__ == "__main__":
    main()
