"""Kernels in C++ that take the memory of their calls and compute nothing: what they hold inside is seen by a ledger."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from trimtab.errors import ConfigError
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import RUNS_ON, names_for
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.torch_mm import GroupedMMBackend


def kernels_without_values(name: str, kind: str) -> Backend:
    """Of a ledger, for the kernels that a run on this kind of device asks for by name: whole grouped GEMMs, or C++.

    Raises:
        ConfigError: they do not run on such a device.
    """
    if RUNS_ON.get(name, kind) != kind:
        raise ConfigError(f"--kernels {name}: they run on {RUNS_ON[name]} devices only, not on {kind}")
    if kind == "cpu" and names_for(name, torch.device(kind))[0] == "cpu":
        return UnrunKernels()
    return GroupedMMBackend()


class UnrunKernels(CompiledKernels):
    """For `Ledger(kernels=)` and tensors without values, whose rows fall evenly on the experts.

    Raises:
        BackendError: the kernels cannot be had here: see `CompiledKernels`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pool: Any = SimpleNamespace(empty=torch.empty)  # of PyTorch's own memory, which may be fake

    def fault_by(self, find: Callable[[CompiledKernels], str | None], asked: Hashable) -> str | None:
        """None: nothing is computed."""
        return None

    def _run(self, name: str, fields: Mapping[str, Any], address: Any = None) -> None:
        experts, rows = fields["E"], fields["R"]
        offsets = (ctypes.c_int64 * (experts + 1))(*(rows * e // experts for e in range(experts + 1)))
        super()._run(name, fields, lambda field, _: ctypes.addressof(offsets) if field == "offsets" else 1)
