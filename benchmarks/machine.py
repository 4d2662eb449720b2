"""What the numbers depend on: machine, versions, who else is at work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch

import trimtab
from trimtab.kernels.compiler import processor_name

PACKAGES = ("torch", "transformers", "triton")
ROOT = Path(__file__).parent.parent


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> dict[str, Any]:
    """Plain values for JSON."""
    versions = {"trimtab": trimtab.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor_name(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native_bf16": native_bf16(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "versions": versions,
        "revision": revision(),
    }


def others_seconds() -> float | None:
    """Of all cores, that neither this process nor its children that ended worked, but others or other machines on the
    same cores: what it grows by. None where the system does not tell."""
    try:
        ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    idle = ticks[3] + ticks[4]  # and waiting for a disk
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - sum(each.ru_utime + each.ru_stime for each in used)


def native_bf16() -> bool:
    """Whether the processor multiplies bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def revision() -> str:
    """The last commit of what is raced, "-dirty" where it was changed since; "" where this is no repository."""
    raced = ["--", "src", "benchmarks", ":!benchmarks/results"]
    try:
        commit, changed = (
            subprocess.run(["git", *asked, *raced], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for asked in (["log", "-1", "--format=%h", "--abbrev=12"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}-dirty" if changed else commit


def machine_words(machine: dict[str, Any]) -> str:
    """One sentence."""
    bf16 = "with" if machine["native_bf16"] else "without"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    device = f", {machine['device']}" if machine["device"] else ""
    return (
        f"{machine['cores']} cores of {machine['processor']} ({machine['instructions']}, {bf16} bf16 instructions), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB{device}, {machine['system']}; {versions}"
    )
