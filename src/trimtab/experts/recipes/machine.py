"""Which hardware a recipe needs, and what this machine has: the words with which one is refused."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from trimtab.errors import ConfigError

Backend = Literal["emulated", "hardware", "auto"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The real kernel of a recipe.

    kernel: the function that runs it. capabilities: CUDA compute capabilities that have it, (major, minor).
    multiple: what in and out features must be multiples of. called: whether trimtab has a call of it.
    modules: Python packages it needs beyond torch. functions: what it calls in torch.nn.functional.
    """

    kernel: str
    capabilities: tuple[tuple[int, int], ...]
    multiple: int
    called: bool = False
    modules: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()


def describe_machine(device: torch.device) -> str:
    """What `device` is and what torch sees of it."""
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        return (
            f"{torch.cuda.get_device_name(device)} with compute capability {major}.{minor}, torch {torch.__version__}"
        )
    seen = "a CUDA device" if torch.cuda.is_available() else "no CUDA device"
    return f"device {device}, torch {torch.__version__} that sees {seen}"


def check_backend_name(backend: str) -> None:
    """Raises:
    ConfigError: no such backend.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} of a recipe: choose one of {BACKENDS}")


def missing(name: str, hardware: Hardware, device: torch.device, in_features: int, out_features: int) -> str | None:
    """Why `device` cannot run `hardware` for these widths: what it needs and what is here. None if it can.

    A layer on the meta device will be materialised: the current CUDA device, if there is one, answers for it.
    """
    wanted = " or ".join(f"{major}.{minor}" for major, minor in hardware.capabilities)
    needs = f"recipe {name!r} with backend='hardware' needs {hardware.kernel} on compute capability {wanted}"
    has = f"this machine has {describe_machine(device)}"
    if not hardware.called:
        return f"{needs}, which trimtab does not call; {has}"
    if device.type not in ("cuda", "meta") or not torch.cuda.is_available():
        return f"{needs}; {has}"
    where = device if device.type == "cuda" else None
    if torch.cuda.get_device_capability(where) not in hardware.capabilities:
        return f"{needs}; {has}"
    lacking = [f"the Python package {module}" for module in hardware.modules if find_spec(module) is None]
    lacking += [f"torch.nn.functional.{name}" for name in hardware.functions if not hasattr(torch.nn.functional, name)]
    if lacking:
        return f"{needs} and {lacking[0]}, which is not installed; {has}"
    if in_features % hardware.multiple or out_features % hardware.multiple:
        return (
            f"{needs} and widths that are multiples of {hardware.multiple}; "
            f"the layer has in_features {in_features} and out_features {out_features}"
        )
    return None
