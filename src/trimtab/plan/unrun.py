"""Kernels in C++ and in Triton that take the memory of their calls and compute nothing, so that a ledger sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import RUNS_ON, names_for
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.torch_mm import GroupedMMBackend
from trimtab.kernels.triton import GATED, WORDS


def kernels_without_values(name: str, kind: str) -> Backend:
    """Of a ledger, for the kernels that a run on this kind of device asks for by name: whole grouped GEMMs, or C++.

    Raises:
        ConfigError: they do not run on such a device.
    """
    if RUNS_ON.get(name, kind) != kind:
        raise ConfigError(f"--kernels {name}: they run on {RUNS_ON[name]} devices only, not on {kind}")
    first = names_for(name, torch.device(kind))[0]
    return UnrunKernels() if first == "cpu" else UnrunGlue() if "triton" in first else GroupedMMBackend()


class UnrunGlue(GroupedMMBackend):
    """What kernels in Triton between PyTorch's grouped GEMMs return, which is all that they hold."""

    words = WORDS

    def activate(self, word: str, pre_RI: Tensor, *_: Any) -> Tensor:
        return pre_RI.new_empty(pre_RI.shape[0], pre_RI.shape[1] // (2 if WORDS.index(word) < GATED else 1))

    def activate_backward(self, word: str, pre_RI: Tensor, dh_RF: Tensor, w_MK: Tensor, *more: Any) -> tuple[Any, ...]:
        return torch.empty_like(pre_RI), torch.empty_like(dh_RF) if more[-1] else None, torch.zeros_like(w_MK)


class UnrunKernels(CompiledKernels):
    """For tensors without values, whose rows fall evenly on the experts. Raises BackendError as those do."""

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
