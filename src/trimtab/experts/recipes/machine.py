"""Which hardware a recipe needs, and what this machine has: the words with which one is refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.errors import BackendError, ConfigError
from trimtab.experts.recipes.base import Backend

BACKENDS: tuple[Backend, ...] = ("emulated", "hardware")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The real kernel of a recipe.

    kernel: the function that runs it. capabilities: CUDA compute capabilities that have it, (major, minor).
    multiple: what in and out features must be multiples of. called: whether trimtab has a call of it.
    """

    kernel: str
    capabilities: tuple[tuple[int, int], ...]
    multiple: int
    called: bool = False


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


def require(name: str, hardware: Hardware, device: torch.device, in_features: int, out_features: int) -> None:
    """Raises:
    BackendError: `device` cannot run `hardware`, the widths do not fit it, or trimtab has no call of it.
    """
    wanted = " or ".join(f"{major}.{minor}" for major, minor in hardware.capabilities)
    needs = f"recipe {name!r} with backend='hardware' needs {hardware.kernel} on compute capability {wanted}"
    has = f"this machine has {describe_machine(device)}"
    advice = "use backend='emulated' for the same numbers on any device"
    if not hardware.called:
        raise BackendError(f"{needs}, which trimtab does not call yet; {has}: {advice}")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(f"{needs}; {has}: {advice}")
    if torch.cuda.get_device_capability(device) not in hardware.capabilities:
        raise BackendError(f"{needs}; {has}: {advice}")
    if in_features % hardware.multiple or out_features % hardware.multiple:
        raise BackendError(
            f"{needs} and widths that are multiples of {hardware.multiple}; "
            f"the layer has in_features {in_features} and out_features {out_features}: {advice}"
        )
