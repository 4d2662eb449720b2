"""What the system says of this machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path


def told() -> dict[str, str]:
    """Of its first core, in the words of Linux ("vendor_id", "model name", "flags"); nothing on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def name() -> str:
    """As its maker calls it, or what else the system calls it."""
    return told().get("model name") or platform.processor() or platform.machine()
