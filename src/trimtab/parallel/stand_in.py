"""Other tensors in the place of parameters, for the length of one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


@contextmanager
def standing_in(places: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within, `module.name` is the tensor; after, whatever was raised, the parameter again.

    The parameters are looked up when it is entered, so that FSDP2's unsharded ones are put back, too. Hooks do not run.
    """
    kept = [module._parameters[name] for module, name in places]
    try:
        for (module, name), tensor in zip(places, tensors, strict=True):
            module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (module, name), parameter in zip(places, kept, strict=True):
            module._parameters[name] = parameter
