"""Kernels that take the memory of their calls and compute nothing: rows fall evenly on the experts of a rank."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from trimtab.dispatch.planned import Pool
from trimtab.errors import BackendError, ConfigError
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import get_backend
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.torch_mm import GroupedMMBackend, TorchBackend
from trimtab.kernels.triton import GATED, WORDS


def kernels_without_values(names: str, kind: str) -> Backend:
    """The first that a run on this kind of device takes by these names. Raises as `kernels_of`, or ConfigError."""
    refused = []
    for name in names.split(","):
        try:
            return get_backend(name, torch.device(kind), UNRUN)
        except BackendError as error:
            refused.append(str(error))
    raise BackendError("; ".join(refused))


class UnrunGlue(GroupedMMBackend):
    """What kernels in Triton between PyTorch's grouped GEMMs return, which is all that they hold."""

    name, words = "grouped_mm+triton", WORDS

    def activate(self, word: str, pre_RI: Tensor, *_: Any) -> Tensor:
        return pre_RI.new_empty(pre_RI.shape[0], pre_RI.shape[1] // (2 if WORDS.index(word) < GATED else 1))

    def activate_backward(self, word: str, pre_RI: Tensor, dh_RF: Tensor, w_MK: Tensor, *more: Any) -> tuple[Any, ...]:
        return torch.empty_like(pre_RI), torch.empty_like(dh_RF) if more[-1] else None, torch.zeros_like(w_MK)


class UnrunTorch(TorchBackend):
    """In a pool whose memory may be fake."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()

    def cuts(self, offsets_e: Sized, rows: int) -> list[int]:
        experts = len(offsets_e) - 1
        return [rows * e // experts for e in range(experts + 1)]

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype, offsets_e: Tensor) -> Tensor:
        return self.pool.empty(rows, width, dtype=dtype)


class UnrunKernels(UnrunTorch, CompiledKernels):
    """Those in C++. Raises BackendError as they do."""

    def fault_by(self, find: Callable[[CompiledKernels], str | None], asked: Hashable) -> str | None:
        """None: nothing is computed."""
        return None

    def _run(self, name: str, fields: Mapping[str, Any], address: Any = None) -> None:
        cuts = self.cuts(range(fields["E"] + 1), fields["R"])
        offsets = (ctypes.c_int64 * len(cuts))(*cuts)
        super()._run(name, fields, lambda field, _: ctypes.addressof(offsets) if field == "offsets" else 1)


def _refused() -> Backend:
    raise ConfigError("kernels 'triton' cannot be planned: plan with 'grouped_mm+triton', which hold as much or more")


UNRUN: dict[str, Callable[[], Backend]] = {
    "cpu": UnrunKernels, "torch": UnrunTorch, "grouped_mm": GroupedMMBackend, "grouped_mm+triton": UnrunGlue,
    "triton": _refused,
}  # fmt: skip
