"""Versions of what trimtab runs on, and whether they fit."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

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


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Version texts; None where a package is not installed. cuda, nccl: what torch was built with.

    unusable: why transformers cannot be imported where it is installed.
    """

    trimtab: str
    python: str
    system: str
    torch: str
    cuda: str | None
    nccl: str | None
    packages: Mapping[str, str | None]
    unusable: str = ""


def look() -> Versions:
    """This machine's versions."""
    from trimtab import __version__

    return Versions(
        trimtab=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch.__version__,
        cuda=torch.version.cuda or getattr(torch.version, "hip", None),
        nccl=_nccl(),
        packages={name: _installed(name) for name in OPTIONAL},
        unusable=_failed_import("transformers") if _installed("transformers") else "",
    )


def judge(v: Versions) -> list[Finding]:
    """Findings about versions."""
    found = [
        Finding(severity="ok", where="trimtab", what=f"{v.trimtab}, Python {v.python}, {v.system}"),
        Finding(
            severity="ok" if numbers(v.torch) >= TORCH else "broken",
            where="torch",
            what=f"{v.torch}, CUDA {v.cuda or 'none'}, NCCL {v.nccl or 'none'}",
            do="" if numbers(v.torch) >= TORCH else f"install torch {_dotted(TORCH)} or newer",
        ),
    ]
    for name, version in v.packages.items():
        if version is None:
            found.append(Finding(severity="note", where=name, what=f"not installed: needed for {OPTIONAL[name]}"))
        elif name == "transformers" and v.unusable:
            what = f"{version} is installed and cannot be imported: {v.unusable}"
            found.append(Finding(severity="warn", where=name, what=what, do="install it anew"))
        elif name == "transformers" and not TRANSFORMERS <= numbers(version) < (TRANSFORMERS[0] + 1,):
            fits = f"{_dotted(TRANSFORMERS)} or newer, below {TRANSFORMERS[0] + 1}"
            found.append(
                Finding(
                    severity="warn", where=name, what=f"{version} is outside of what trimtab is made for",
                    do=f"install transformers {fits}",
                )
            )  # fmt: skip
        else:
            found.append(Finding(severity="ok", where=name, what=version))
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


def _nccl() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
