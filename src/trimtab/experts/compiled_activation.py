"""An activation by name inside a graph of `torch.compile`: `pre` alone is saved, forward and backward as eagerly.

Imported while a graph is traced and at no other time, as `compiled` is.

Legend: I width of the pre-activations, F hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.experts.activations import BY_NAME


@torch.library.custom_op("trimtab::activate", mutates_args=())
def activate(pre: Tensor, activation: str) -> Tensor:
    """[T, I] -> [T, F]."""
    with torch.no_grad():
        return BY_NAME[activation]().forward(pre)


@activate.register_fake
def _(pre: Tensor, activation: str) -> Tensor:
    width = pre.shape[-1] // 2 if BY_NAME[activation]().gated else pre.shape[-1]
    return pre.new_empty(*pre.shape[:-1], width)


@torch.library.custom_op("trimtab::activate_backward", mutates_args=())
def activate_backward(pre: Tensor, dh: Tensor, activation: str) -> Tensor:
    """The gradient of `pre` [T, I] from that of the hidden rows [T, F]."""
    with torch.no_grad():
        return BY_NAME[activation]().backward(pre, dh)[0]


@activate_backward.register_fake
def _(pre: Tensor, dh: Tensor, activation: str) -> Tensor:
    return torch.empty_like(pre)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    pre, ctx.activation = inputs
    ctx.save_for_backward(pre)


def _backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
    return activate_backward(*ctx.saved_tensors, dh, ctx.activation), None


activate.register_autograd(_backward, setup_context=_save)
