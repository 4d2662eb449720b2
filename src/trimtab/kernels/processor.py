"""What the system says of this machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def told() -> dict[str, str]:
    """Of its first core, in the words of Linux ("vendor_id", "model name", "flags"); nothing on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def multiplies_bf16() -> bool:
    """Whether it has instructions for products of bfloat16."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def name() -> str:
    """As its maker calls it, or what else the system calls it; with the numbers of its kind, for a virtual machine's
    processor often has a name that several generations share."""
    facts = told()
    named = facts.get("model name") or platform.processor() or platform.machine()
    kind = facts.get("cpu family"), facts.get("model")
    return named if None in kind else f"{named} (family {kind[0]}, model {kind[1]})"
