"""Naming kernels in the arguments of operators."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakValueDictionary

import torch

from trimtab.kernels.api import Backend
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.memory import apart, no_values

_IN_USE: WeakValueDictionary[str, Backend] = WeakValueDictionary()


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
    return apart(device, lambda: KernelChoice(first, fallback=others).on(device, dtype))


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
