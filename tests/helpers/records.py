"""Records of races that took known times."""

from __future__ import annotations

from typing import Any

from benchmarks.result import Entry, Race, Record

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "memory_bytes": 2**34,
    "instructions": "AVX512",
    "native_bf16": False,
    "device": "",
    "system": "Linux",
    "versions": {"torch": "2.13"},
    "revision": "0123456789ab",
    "load_average": [0.1, 0.1, 0.1],
}
BOTH = "forward+backward"


def entry(name: str, role: str, seconds: float, *, group: str = "balanced", **more: Any) -> Entry:
    return Entry(name=name, role=role, group=group, seconds={BOTH: [[seconds, seconds * 3], [seconds]]}, **more)


def race(malloc: str, ours: float, peer: float, limit: float) -> Race:
    copy = Entry(name="copy", role="bandwidth", facts={"bytes": 100}, seconds={"copy": [[0.5]]})
    entries = [
        entry("trimtab auto", "ours", ours, facts={"peak": 2_000_000_000}),
        entry("grouped_mm", "peer", peer),
        entry("eager", "peer", 9 * peer),
        entry("dense bf16", "limit", 4 * limit, group=""),
        entry("dense fp32", "limit", limit, group=""),
        Entry(name="batched_mm", role="peer", group="balanced", failed="cannot be imported here: No module"),
        copy,
    ]
    return Race(malloc=malloc, entries=entries, fewest_bytes={"balanced": {BOTH: 40}})


def record(ours: float = 0.5, **case: Any) -> Record:
    described = {"shape": [512, 256, 64, 8], "dtype": "bf16", "tokens": 2048, "threads": 1, "ranks": 1}
    held = {"trimtab auto": (60, 40, 10), "grouped_mm": (100, 100, 10)}
    return Record(
        part="layer",
        case=described | case,
        command="python -m benchmarks layer",
        machine=MACHINE,
        settings={"turns": 2, "modes": [BOTH, "copy"], "took": 1.0},
        races=[race("default", ours, 1.5, 0.4), race("tuned", ours * 1.1, 1.2, 0.45)],
        memory={
            name: dict(zip(("resident", "tensors", "gradients"), values, strict=True)) for name, values in held.items()
        },
    )
