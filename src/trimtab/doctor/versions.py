"""Versions of what trimtab runs on, and whether they fit."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping

import torch

from trimtab import __version__
from trimtab.doctor.findings import Finding
from trimtab.errors import first_line

TORCH = (2, 11)
"""The oldest torch."""
TRANSFORMERS = (5, 23)
"""The oldest transformers; the next major version is not known to work."""
OPTIONAL = {
    "transformers": "MoE families of transformers (trimtab.integrations.transformers) and `trimtab train`",
    "accelerate": "loading transformers models with a distributed config",
    "torchtitan": "`trimtab verify --impl torchtitan`",
    "triton": "Triton kernels on a GPU",
}


def look() -> list[Finding]:
    """Findings about this machine's versions."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"  # type: ignore[no-untyped-call]
    built = f"CUDA {torch.version.cuda or getattr(torch.version, 'hip', None) or 'none'}, NCCL {nccl}"
    packages = {name: _installed(name) for name in OPTIONAL}
    unusable = _failed_import("transformers") if packages["transformers"] else ""
    own = Finding("ok", "trimtab", f"{__version__}, {system}")
    return [own, judge_torch(torch.__version__, built), *judge_packages(packages, unusable)]


def judge_torch(version: str, built: str) -> Finding:
    """The finding about torch of that version, built with CUDA and NCCL of those."""
    what = f"{version}, {built}"
    if numbers(version) >= TORCH:
        return Finding("ok", "torch", what)
    return Finding("broken", "torch", what, f"install torch {_dotted(TORCH)} or newer")


def judge_packages(packages: Mapping[str, str | None], unusable: str = "") -> list[Finding]:
    """Findings about optional packages, None where one is not installed.

    unusable: why transformers cannot be imported where it is installed.
    """
    found = []
    for name, version in packages.items():
        if version is None:
            found.append(Finding("note", name, f"not installed: needed for {OPTIONAL[name]}"))
        elif name == "transformers" and unusable:
            what = f"{version} is installed and cannot be imported: {unusable}"
            found.append(Finding("warn", name, what, "install it anew"))
        elif name == "transformers" and not TRANSFORMERS <= numbers(version) < (TRANSFORMERS[0] + 1,):
            do = f"install transformers {_dotted(TRANSFORMERS)} or newer, below {TRANSFORMERS[0] + 1}"
            found.append(Finding("warn", name, f"{version} is outside of what trimtab is made for", do))
        else:
            found.append(Finding("ok", name, version))
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _failed_import(name: str) -> str:
    """Why it fails, or ""."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a package that is half there raises anything
        return first_line(error, typed=True)
    return ""
