"""Contestants of races that take known times or fail in known ways, and their records."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest.mock import Mock

from benchmarks.result import Entry, Race, Record
from benchmarks.subject import Subject, Where


def _sleep(seconds: float) -> Any:
    return lambda: time.sleep(seconds)


class Clock:
    """In place of this process's clock: it goes on by what the steps say that they take, and by nothing else."""

    def __init__(self) -> None:
        self.now = 0.0
        time.perf_counter = lambda: self.now

    def step(self, seconds: float) -> Any:
        def run() -> None:
            self.now += seconds

        return run


def sleeper(args: dict[str, Any], where: Where) -> Subject:
    """args: modes, mode -> seconds; with several ranks the last rank takes twice as long."""
    slow, clock = 2 if where.ranks > 1 and where.rank == where.ranks - 1 else 1, Clock()
    modes = {mode: clock.step(seconds * slow) for mode, seconds in args["modes"].items()}

    def fails() -> None:
        if where.rank == args["fails_on_rank"]:
            raise ValueError("only this rank")
        time.sleep(600)

    if "fails_on_rank" in args:
        modes["fails"] = fails
    facts = {"bytes": args.get("bytes", 0), "malloc": os.environ.get("MALLOC_TRIM_THRESHOLD_")}
    return Subject(modes=modes, facts=facts)


def not_installed(args: dict[str, Any], where: Where) -> Subject:
    import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401

    raise AssertionError("imported what is not there")


def raises(args: dict[str, Any], where: Where) -> Subject:
    return Subject(modes={"forward": Mock(side_effect=ValueError("bad shapes\nwith details"))})


def dies(args: dict[str, Any], where: Where) -> Subject:
    def step() -> None:
        print("out of luck", flush=True)
        os._exit(3)

    return Subject(modes={"forward": step})


def hangs(args: dict[str, Any], where: Where) -> Subject:
    return Subject(modes={"forward": _sleep(600)})


def answers(args: dict[str, Any], where: Where) -> Subject:
    """args: value, which is its outcome."""
    import torch

    return Subject(modes={"forward": _sleep(0.001)}, outcome=lambda: {"y": torch.full((2,), args["value"])})


def counts(args: dict[str, Any], where: Where) -> Subject:
    """A step takes as many seconds as steps were before it."""
    import torch

    clock, steps = Clock(), [0]

    def step() -> None:
        clock.now += steps[0]
        steps[0] += 1

    def outcome() -> dict[str, torch.Tensor]:
        step()
        return {"y": torch.ones(2)}

    return Subject(modes={"forward": step}, outcome=outcome, judged="forward")


def parts(args: dict[str, Any], where: Where) -> Subject:
    """Times its parts itself."""
    return Subject(modes={"step": lambda: {"first": 0.25, "second": 0.5}})


def elsewhere(args: dict[str, Any], where: Where) -> Subject:
    """Says what it finds first on its path, and what its environment says."""
    import elsewhere as found  # type: ignore[import-not-found]

    return Subject(modes={"forward": _sleep(0.001)}, facts={"found": found.__file__, "said": os.environ["SET_FOR_ONE"]})


def allocates(args: dict[str, Any], where: Where) -> Subject:
    """args: bytes, of which one step touches as many twice over: once as a tensor, once behind PyTorch's back."""
    import torch

    def step() -> None:
        made = torch.ones(args["bytes"], dtype=torch.uint8)
        hidden = bytearray(args["bytes"])
        hidden[::4096] = bytes(len(hidden[::4096]))
        del made, hidden

    return Subject(modes={"forward+backward": step}, held=7)


def stays(args: dict[str, Any], where: Where) -> Subject:
    """Says on which cores its steps run."""
    import torch

    return Subject(modes={}, outcome=lambda: {"cores": torch.tensor(sorted(os.sched_getaffinity(0)))})


MACHINE = {
    "processor": "a processor", "cores": 2, "memory_bytes": 2**34, "instructions": "AVX512", "native_bf16": False,
    "device": "", "system": "Linux", "versions": {"torch": "2.13"}, "revision": "0123456789ab",
}  # fmt: skip
BOTH = "forward+backward"


def entry(name: str, role: str, seconds: float, *, group: str = "balanced", **more: Any) -> Entry:
    return Entry(name=name, role=role, group=group, seconds={BOTH: [[seconds, seconds * 3], [seconds]]}, **more)


def race(malloc: str, ours: float, peer: float, limit: float) -> Race:
    entries = [
        entry("trimtab auto", "ours", ours, facts={"peak": 2_000_000_000}), entry("grouped_mm", "peer", peer),
        entry("eager", "peer", 9 * peer), entry("dense bf16", "limit", 4 * limit, group=""),
        entry("dense fp32", "limit", limit, group=""),
        Entry(name="batched_mm", role="peer", group="balanced", failed="cannot be imported here: No module"),
        Entry(name="copy", role="bandwidth", facts={"bytes": 100}, seconds={"copy": [[0.5]]}),
    ]  # fmt: skip
    return Race(malloc=malloc, entries=entries, fewest_bytes={"balanced": {BOTH: 40}})


def record(ours: float = 0.5, **case: Any) -> Record:
    described = {"shape": [512, 256, 64, 8], "dtype": "bf16", "tokens": 2048, "threads": 1, "ranks": 1}
    return Record(
        part="layer", case=described | case, command="python -m benchmarks layer", machine=MACHINE,
        settings={"turns": 2, "modes": [BOTH, "copy"], "took": 1.0},
        races=[race("default", ours, 1.5, 0.4), race("tuned", ours * 1.1, 1.2, 0.45)],
        memory={
            "trimtab auto": {"resident": 60, "tensors": 40, "gradients": 10},
            "grouped_mm": {"resident": 100, "tensors": 100, "gradients": 10},
        },
    )  # fmt: skip
