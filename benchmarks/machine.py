"""What the numbers depend on: machine, versions, load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

import trimtab
from trimtab.kernels import processor
from trimtab.launched import cores

PACKAGES = ("torch", "transformers", "torchtitan", "triton")


def describe() -> dict[str, Any]:
    """Plain values for JSON."""
    versions = {"trimtab": trimtab.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor.name(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native_bf16": bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "versions": versions,
        "load_average": list(os.getloadavg()),
    }


def words(machine: dict[str, Any]) -> str:
    """One sentence."""
    bf16 = "with" if machine["native_bf16"] else "without"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cores']} cores of {machine['processor']} ({machine['instructions']}, {bf16} bf16 instructions), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}; {versions}"
    )
