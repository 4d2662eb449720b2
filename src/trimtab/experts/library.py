"""Registering operators of `torch.library`, and naming kernels in their arguments.

An operator has one kernel for every device, a fake one for tensors without values, and a formula for PyTorch's FLOP
counter: eager mode, `torch.compile`, `torch.export`, the meta device, `FakeTensorMode` and `FlopCounterMode` all call
the same operator. Autograd is a thin `autograd.Function` around two of them, whose backward is again an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.flop_counter import register_flop_formula

from trimtab.kernels.api import Backend
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.memory import apart, no_values

_LIBRARY = torch.library.Library("trimtab", "FRAGMENT")  # type: ignore[no-untyped-call]
KERNELS: dict[Any, Callable[..., Any]] = {}
"""What computes each operator, for whoever measures what goes on inside."""

_IN_USE: WeakValueDictionary[str, Backend] = WeakValueDictionary()


def operator(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], flops: Callable[..., int] | None = None
) -> Callable[..., Any]:
    """Define `trimtab::<schema>` and return what calls it.

    Args:
        schema: of `torch.library.Library.define`.
        kernel: what computes it, on any device. It is called without autograd.
        fake: makes its results without values; sees tensors on the meta device, or fake ones.
        flops: from the shapes of the arguments, as `torch.utils.flop_counter.register_flop_formula` takes it.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"trimtab::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.trimtab, name)
    if flops is not None:
        register_flop_formula(packet)(flops)
    KERNELS[packet.default] = kernel
    return packet.default  # type: ignore[no-any-return]


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
