"""Other tensors in the place of parameters, for the length of one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from trimtab.errors import InputError

Place = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""

_INSIDE = "_stood_in_by"


@contextmanager
def standing_in(places: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within, `module.name` is the tensor; after, whatever was raised, the parameter again.

    The parameters are looked up when it is entered, so that FSDP2's unsharded ones are put back, too. Hooks do not run.

    Raises:
        InputError: another thread is inside of one of the modules: each would take the other's for the parameters.
    """
    traced = torch.compiler.is_compiling()
    slots = [(module._parameters, name) for module, name in places]
    if not traced and all(of[name] is t for (of, name), t in zip(slots, tensors, strict=True)):
        yield
        return
    with nullcontext() if traced else _alone_in({module for module, _ in places}):
        kept = [of[name] for of, name in slots]
        try:
            for (of, name), tensor in zip(slots, tensors, strict=True):
                of[name] = tensor  # type: ignore[assignment]
            yield
        finally:
            for (of, name), parameter in zip(slots, kept, strict=True):
                of[name] = parameter


@contextmanager
def _alone_in(modules: Iterable[nn.Module]) -> Iterator[None]:
    mark, entered = object(), list[nn.Module]()
    try:
        for module in modules:
            if module.__dict__.setdefault(_INSIDE, mark) is not mark:  # one step, whatever other threads do
                raise InputError(
                    f"{type(module).__name__} is entered twice at once, by two threads perhaps: let them take turns"
                )
            entered.append(module)
        yield
    finally:
        for module in entered:
            del module.__dict__[_INSIDE]
