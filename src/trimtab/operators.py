"""Registering operators of `torch.library`, and the named tuples that programs of `torch.export` return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import _register_namedtuple
from torch.utils.flop_counter import register_flop_formula

T = TypeVar("T", bound=tuple)  # type: ignore[type-arg]

_LIBRARY = torch.library.Library("trimtab", "FRAGMENT")  # type: ignore[no-untyped-call]
KERNELS: dict[Any, Callable[..., Any]] = {}
"""The function behind each operator, for those who measure inside."""


def operator(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], flops: Callable[..., int] | None = None
) -> Callable[..., Any]:
    """Define `trimtab::<schema>` and return what calls it: eager mode, `torch.compile`, export, the meta device,
    `FakeTensorMode` and `FlopCounterMode` all see the same operator.

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


def exportable(result: type[T]) -> type[T]:
    """A named tuple that programs of `torch.export` may return: they can be saved and loaded."""
    _register_namedtuple(result, serialized_type_name=f"{result.__module__}.{result.__qualname__}")
    return result
