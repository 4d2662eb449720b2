"""Which kernels compute: those that were asked for, once they have passed their self-test on the device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trimtab.errors import BackendError, ConfigError
from trimtab.kernels.grouped import KERNELS, Kernels, get_kernels, names_for
from trimtab.kernels.memory import no_values
from trimtab.kernels.shapes import ShapeKernels

if TYPE_CHECKING:
    from trimtab.kernels.selftest import SelfTest


class KernelChoice:
    """Kernels by name, tested at first use on a device.

    Args:
        kernels: "auto" (on the CPU "compiled" or else, with a warning that says why, "loop"), a name that
            `get_kernels` knows, or kernels of one's own.
        fallback: what may be taken instead where these fail, in order. Nothing unless asked for.

    Raises:
        ConfigError: a name that stands for no kernels.
    """

    def __init__(self, kernels: str | Kernels = "auto", *, fallback: Sequence[str | Kernels] = ()) -> None:
        self.candidates = (kernels, *fallback)
        known = ("auto", *KERNELS)
        if unknown := [c for c in self.candidates if c is None or (isinstance(c, str) and c not in known)]:
            raise ConfigError(f"kernels={unknown[0]!r} is not one of {known}")
        self.reports: list[SelfTest] = []
        self._chosen: dict[tuple[torch.device, torch.dtype, tuple[int, int] | None], Kernels] = {}

    def on(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, int] | None = None) -> Kernels:
        """The kernels for `device` and products in `dtype`; for expert MLPs of `shape` (D, F), where it matters.

        The first call for each reads results back to the host, so it must lie outside of a CUDA graph's capture, also
        the first one under autocast. On the meta device and under PyTorch's `FakeTensorMode` it is `ShapeKernels`,
        whatever was chosen.

        Raises:
            BackendError: none of the candidates passed; names each and says why.
        """
        if no_values(device):
            return ShapeKernels()
        key = (device, dtype, shape if device.type == "cuda" else None)
        if key not in self._chosen:
            self._chosen[key] = self._choose(device, dtype, shape)
        return self._chosen[key]

    def _choose(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, int] | None) -> Kernels:
        from trimtab.kernels.selftest import self_test

        refused: list[str] = []
        candidates = [n for c in self.candidates for n in (names_for(c, device) if isinstance(c, str) else (c,))]
        for candidate in candidates:
            try:
                kernels = get_kernels(candidate, device) if isinstance(candidate, str) else candidate
                report = self_test(kernels, device, kernels.compute_dtype(dtype))
            except BackendError as error:
                refused.append(str(error))
                continue
            self.reports.append(report)
            if report.fault is not None:
                refused.append(f"kernels {kernels.name!r} failed their self-test on {device} ({dtype}): {report.fault}")
                continue
            if refused:
                warnings.warn(f"{'; '.join(refused)}. Kernels {kernels.name!r} are used instead", stacklevel=3)
            return kernels
        advice = "" if len(candidates) > 1 else ". Name others in `fallback` to allow them instead"
        raise BackendError("; ".join(refused) + advice, phase="experts")
