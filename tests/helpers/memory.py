"""The most memory that a call holds, files that it maps and what the allocator keeps among it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MB = 2**20


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that this process holds at most during the call, beside what it held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{what}:")[2].split()[0]) * 1024
