"""Activations between the two GEMMs of an expert, with the backward taken from the pre-activations alone.

    SwiGLU        silu(gate) * up of [gate | up]                                    (Shazeer 2020, arXiv 2002.05202)
    Recomputed    any differentiable function, and its parameters' gradients, by running it again

Legend: n rows, I width of the pre-activations (2F with a gate, else F), F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Activation(Protocol):
    """h = f(pre). Parameters of f, if any, are listed so that their gradients come out as well."""

    params: tuple[Tensor, ...]

    def forward(self, pre_nI: Tensor) -> Tensor:
        """[n, I] -> [n, F]. Does not change its input."""
        ...

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Gradients of `pre` and of each parameter."""
        ...


class SwiGLU:
    """silu(gate) * up, gate first."""

    params: tuple[Tensor, ...] = ()

    def forward(self, pre_nI: Tensor) -> Tensor:
        gate, up = pre_nI.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        gate, up = pre_nI.chunk(2, dim=-1)
        d_pre = torch.empty_like(pre_nI)
        d_gate, d_up = d_pre.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), dh_nF, out=d_up)
        torch.ops.aten.silu_backward.grad_input(dh_nF * up, gate, grad_input=d_gate)
        return d_pre, ()


class Recomputed:
    """A differentiable row-wise function, run again for its backward.

    Args:
        function: [n, I] -> [n, F], any number of rows including none.
        params: tensors it uses whose gradients are wanted.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], params: Sequence[Tensor] = ()) -> None:
        self.function = function
        self.params = tuple(params)

    def forward(self, pre_nI: Tensor) -> Tensor:
        return self.function(pre_nI)

    def backward(self, pre_nI: Tensor, dh_nF: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        with torch.enable_grad():
            pre = pre_nI.detach().requires_grad_()
            h = self.function(pre)
        wanted = [p for p in self.params if p.requires_grad]
        d_pre, *d_wanted = torch.autograd.grad(h, [pre, *wanted], dh_nF.to(h.dtype), materialize_grads=True)
        found = iter(d_wanted)
        return d_pre, [next(found) if p.requires_grad else torch.zeros_like(p) for p in self.params]
