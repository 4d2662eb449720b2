"""The choice of a backend: the one that was asked for, once it has passed its self-test on the device.

torch        one `mm` per expert, with PyTorch alone                    CPU
cpu          whole expert MLPs in C++                                   CPU
grouped_mm   PyTorch's grouped GEMM, offsets on the device              any
grouped_mm+triton   the same, rows moved and activated by Triton        CUDA
triton       whole SwiGLU experts in Triton                             CUDA
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from trimtab.errors import BackendError, ConfigError
from trimtab.kernels.api import Backend
from trimtab.kernels.tensor_checks import in_clean_thread, no_values

if TYPE_CHECKING:
    from trimtab.kernels.selftest import SelfTest


def _from(module: str, name: str) -> Callable[[], Backend]:
    return lambda: getattr(import_module(f"trimtab.kernels.{module}"), name)()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": _from("compiled", "compiled_kernels"),
    "torch": _from("torch_mm", "TorchBackend"),
    "grouped_mm": _from("torch_mm", "GroupedMMBackend"),
    "grouped_mm+triton": _from("triton.glue", "GluedBackend"),
    "triton": _from("triton.products", "TritonBackend"),
}
"""Each loads itself when it is asked for first."""
RUNS_ON = {"cpu": "cpu", "torch": "cpu", "grouped_mm+triton": "cuda", "triton": "cuda"}
"""Type of device; others run on any."""
_IN_USE: WeakValueDictionary[str, Backend] = WeakValueDictionary()
"""Backends by the names that stand for them in the arguments of operators."""


def names_for(name: str, device: torch.device) -> tuple[str, ...]:
    """The backends that `name` stands for on `device`, in the order of preference: "auto" for the fastest there."""
    if name != "auto":
        return (name,)
    if device.type != "cpu":
        return ("grouped_mm+triton", "grouped_mm") if device.type == "cuda" else ("grouped_mm",)
    from trimtab.kernels.compiled import switched_off

    return ("torch",) if switched_off() else ("cpu", "torch")


def get_backend(name: str, device: torch.device, of: Mapping[str, Callable[[], Backend]] = BACKENDS) -> Backend:
    """The backend called `name`: one of `of`, or "auto" for the fastest on `device`.

    Raises:
        BackendError: no such backend, or it cannot run on the device.
    """
    names = names_for(name, device)
    for other in names[:-1]:
        try:
            return get_backend(other, device, of)
        except BackendError:
            continue  # `KernelChoice` says so
    last = names[-1]
    if last not in of:
        raise BackendError(f"no kernels named {last!r}: choose one of {['auto', *of]}")
    if device.type != RUNS_ON.get(last, device.type):
        raise BackendError(f"kernels {last!r} run on {RUNS_ON[last]} devices only, not on {device}")
    return of[last]()


class KernelChoice:
    """A backend by name, tested at first use on a device.

    Args:
        kernels: "auto" (on the CPU "cpu" or else, with a warning that says why, "torch"; on a GPU
            "grouped_mm+triton" or else, with a warning, "grouped_mm"), a name in `BACKENDS`, or a backend of one's own.
        fallback: what may be taken instead where these fail, in order. Nothing unless asked for.

    Raises:
        ConfigError: a name that stands for no backend.
    """

    def __init__(self, kernels: str | Backend = "auto", *, fallback: Sequence[str | Backend] = ()) -> None:
        known = ("auto", *BACKENDS)
        self.candidates = (kernels, *fallback)
        if unknown := [c for c in self.candidates if c is None or (isinstance(c, str) and c not in known)]:
            raise ConfigError(f"kernels={unknown[0]!r} is not one of {known}")
        self.reports: list[SelfTest] = []
        self._chosen: dict[tuple[torch.device, torch.dtype], Backend] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> Backend:
        """The backend for `device` and products in `dtype`.

        The first call for each reads results back to the host, so it must lie outside of a CUDA graph's capture, also
        the first one under autocast. For tensors without values it is "grouped_mm", whatever was chosen.

        Raises:
            BackendError: none of the candidates passed; names each and says why.
        """
        if no_values(device):
            return BACKENDS["grouped_mm"]()
        key = (device, dtype)
        if key not in self._chosen:
            self._chosen[key] = self._choose(device, dtype)
        return self._chosen[key]

    def _choose(self, device: torch.device, dtype: torch.dtype) -> Backend:
        from trimtab.kernels.selftest import self_test

        refused: list[str] = []
        candidates = [n for c in self.candidates for n in (names_for(c, device) if isinstance(c, str) else (c,))]
        for candidate in candidates:
            try:
                backend = get_backend(candidate, device) if isinstance(candidate, str) else candidate
                report = self_test(backend, device, backend.compute_dtype(dtype))
            except BackendError as error:
                refused.append(str(error))
                continue
            self.reports.append(report)
            if report.fault is not None:
                refused.append(f"kernels {backend.name!r} failed their self-test on {device} ({dtype}): {report.fault}")
                continue
            if refused:
                warnings.warn(f"{'; '.join(refused)}. Kernels {backend.name!r} are used instead", stacklevel=3)
            return backend
        advice = "" if len(candidates) > 1 else ". Name others in `fallback` to allow them instead"
        raise BackendError("; ".join(refused) + advice, phase="experts")


def name_of(kernels: Backend) -> str:
    """A string for an operator's argument that stands for these very kernels, as long as they live."""
    name = f"@{id(kernels):x}"
    _IN_USE[name] = kernels
    return name


def kernels_of(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Kernels by what `name_of` returned, or by the names of a `KernelChoice`, joined by commas.

    Raises:
        BackendError: none of those named can run there.
    """
    return _IN_USE[name] if name.startswith("@") else _chosen(name, device, dtype)


@lru_cache(maxsize=64)
def _chosen(names: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Chosen and tested once in a process, because a graph holds no `KernelChoice`. In a thread of its own: an operator
    runs where nothing is recorded for a backward, and a self-test may need one."""
    first, *others = names.split(",")
    return in_clean_thread(device, lambda: KernelChoice(first, fallback=others).on(device, dtype))


def kernels_for(choice: KernelChoice, device: torch.device, dtype: torch.dtype) -> Backend | str | None:
    """The kernels of a choice, or, where a graph is traced or there are no values, their names: an operator chooses
    when it runs. None where a graph is traced and kernels of one's own have no name.

    Raises:
        BackendError: none of the candidates passed its self-test.
    """
    if torch.compiler.is_compiling() or no_values(device):
        names = [name for name in choice.candidates if isinstance(name, str)]
        return ",".join(names) if len(names) == len(choice.candidates) else None
    return choice.on(device, dtype)
