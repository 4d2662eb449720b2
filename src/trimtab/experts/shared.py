"""What every token passes: shared experts, gated or not, and projections. Ordinary linear layers, sharded like any.

Legend: T tokens, D model dim, I = 2F with a gate in the activation, else F, F hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.utils.parametrize import is_parametrized

from trimtab.backward import may_have_tangents, once_differentiable
from trimtab.errors import ConfigError
from trimtab.experts.activations import BY_NAME, Activation
from trimtab.routing.recompute import unseen
from trimtab.validation import check_flags, check_sizes, holds_values


class _Activate(Function):
    """h = f(pre), with `pre` alone saved."""

    @staticmethod
    def forward(ctx: Any, pre_TI: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(pre_TI)
        ctx.activation = activation
        with unseen():
            return activation.forward(pre_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_TF: Tensor) -> tuple[Tensor, None]:
        return ctx.activation.backward(*ctx.saved_tensors, dh_TF)[0], None


class Projection(nn.Linear):
    """x W^T without a bias, computed in the parameter's dtype or autocast's, given back in x's."""

    def __init__(
        self, inputs: int, outputs: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        check_sizes(inputs=inputs, outputs=outputs)
        super().__init__(inputs, outputs, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return super().forward(x.to(_stored_in(self, x))).to(x.dtype)


def _stored_in(linear: nn.Module, x: Tensor) -> torch.dtype:
    """The weight's dtype, if it is one of values and not of codes: what replaces a linear layer to hold a quantised
    weight knows itself what to do with `x`. Of what has no weight, and of one that is computed at each look, it is that
    of the first parameter."""
    weight = None if is_parametrized(linear, "weight") else getattr(linear, "weight", None)
    stored = (weight if isinstance(weight, Tensor) else next(linear.parameters(), x)).dtype
    return stored if holds_values(stored) else x.dtype


class SharedExperts(nn.Module):
    """sigmoid(x w) * down(activation(up(x))); without the first factor where `gated` is false.

    Args:
        dim, hidden: D and F, F summed over the shared experts.
        activation: as in `ExpertMLP`; with a gate of its own, `up` has 2F outputs.
        gated: one gate per token, from `gate` [1, D] (Qwen2-MoE).

    Several shared experts of hidden dim f are one of F = n f. There are no biases, so a zero token stays zero.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        gated: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, hidden=hidden)
        check_flags(gated=gated)
        if activation not in tuple(BY_NAME):
            raise ConfigError(f"activation {activation!r} of shared experts is not one of {tuple(BY_NAME)}")
        self.name, self.activation = activation, BY_NAME[activation]()
        width = 2 * hidden if self.activation.gated else hidden
        self.up = nn.Linear(dim, width, bias=False, dtype=dtype, device=device)
        self.down = nn.Linear(hidden, dim, bias=False, dtype=dtype, device=device)
        self.gate = nn.Linear(dim, 1, bias=False, dtype=dtype, device=device) if gated else None

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] in x's dtype, computed in the parameters' dtype or autocast's."""
        x = x_TD.to(_stored_in(self.up, x_TD))
        y: Tensor = self.down(self._activated(self.up(x)))
        return (y if self.gate is None else y * self.gate(x).sigmoid()).to(x_TD.dtype)

    def _activated(self, pre_TI: Tensor) -> Tensor:
        h_TF: Tensor
        if torch.compiler.is_compiling() and may_have_tangents():
            from trimtab.eager import eagerly

            h_TF = eagerly(self._activated, pre_TI)
        elif torch.compiler.is_compiling():
            from trimtab.experts.compiled_activation import activate

            h_TF = activate(pre_TI, self.name)
        else:
            h_TF = _Activate.apply(pre_TI, self.activation)  # type: ignore[no-untyped-call]
        return h_TF
