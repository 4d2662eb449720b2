"""What `torch.compile` needs of a router: loads that are counted once, also where a compiled forward runs again, and
numbers that stay numbers.

Imported while a graph is traced and at no other time: importing it defines the operator `trimtab::counted_once`.

Legend: E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, _register_namedtuple

from trimtab.errors import ConfigError
from trimtab.routing.recompute import in_backward


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant(text: str) -> float:
    """The number that `float.hex` spells so, never a symbol: the text is what a graph is guarded by."""
    return float.fromhex(text)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def storable(result: type) -> bool:
    """From now on, a program of `torch.export` whose result is of this named tuple can be saved and loaded."""
    if result not in SUPPORTED_NODES:
        _register_namedtuple(result, serialized_type_name=f"{result.__module__}.{result.__qualname__}")
    return True


@torch.library.custom_op("trimtab::counted_once", mutates_args=())
def counted_once(counts_E: Tensor, of_step: bool) -> Tensor:
    """The counts, or zeros inside a backward: there a checkpoint runs again what has been counted.

    Args:
        of_step: whether a loss was taken from the counts of the step so far, which this run's are then part of.

    Raises:
        ConfigError: inside a backward with `of_step`.
    """
    if not in_backward():
        return counts_E.clone()
    if of_step:
        raise ConfigError(
            "global_aux_loss from the counts of the step so far, in a compiled layer that a checkpoint runs again: it "
            "would count this micro-batch twice. Set `StepTotals.counts_E`, or compile the checkpointed block as a "
            "whole, with the checkpoint inside",
            phase="route",
        )
    return torch.zeros_like(counts_E)


@counted_once.register_fake
def _(counts_E: Tensor, of_step: bool) -> Tensor:
    return torch.empty_like(counts_E)
