"""Records of races that took known times."""

from __future__ import annotations

from typing import Any

from benchmarks.result import Entry, Race, Record

MACHINE = {
    "processor": "a processor", "cores": 2, "memory_bytes": 2**34, "instructions": "AVX512", "native_bf16": False,
    "system": "Linux", "versions": {"torch": "2.13"}, "load_average": [0.1, 0.1, 0.1],
}  # fmt: skip
BOTH = "forward+backward"
NOW = "0123456789ab"
"""The digest of the sources, in tests that take them from `as_of_now`."""


def entry(name: str, role: str, seconds: float, *, group: str = "balanced", **more: Any) -> Entry:
    return Entry(name=name, role=role, group=group, seconds={BOTH: [[seconds, seconds * 3], [seconds]]}, **more)


def race(malloc: str, ours: float, peer: float, limit: float) -> Race:
    copy = Entry(name="copy", role="bandwidth", facts={"bytes": 100}, seconds={"copy": [[0.5]]})
    entries = [
        entry("trimtab auto", "ours", ours),
        entry("grouped_mm", "peer", peer),
        entry("eager", "peer", 9 * peer),
        entry("dense bf16", "limit", 4 * limit, group=""),
        entry("dense fp32", "limit", limit, group=""),
        Entry(name="torchtitan", role="peer", group="balanced", failed="cannot be imported here: No module"),
        copy,
    ]
    return Race(malloc=malloc, entries=entries, fewest_bytes={"balanced": {BOTH: 40}})


def record(ours: float = 0.5, **case: Any) -> Record:
    described = {
        "shape": [512, 256, 64, 8], "dtype": "bf16", "tokens": 2048, "threads": 1, "ranks": 1,
        "workloads": ["balanced"], "in_place": False,
    }  # fmt: skip
    return Record(
        part="layer", case=described | case, command="trimtab bench layer", machine=MACHINE, settings={"turns": 2},
        races=[race("default", ours, 1.5, 0.4), race("tuned", ours * 1.1, 1.2, 0.45)],
        memory={"trimtab auto": {"resident": 60, "tensors": 40, "gradients": 10}, "grouped_mm": {"resident": 100,
                "tensors": 100, "gradients": 10}},
        sources=NOW,
    )  # fmt: skip
