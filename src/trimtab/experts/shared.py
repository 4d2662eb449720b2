"""What every token passes: shared experts, gated or not, and projections. Ordinary linear layers, sharded like any.

Legend: T tokens, D model dim, I = 2F with a gate in the activation, else F, F hidden dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from trimtab.experts.activations import activate, activation_of, check_activation
from trimtab.validation import check_flags, check_sizes, holds_values


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
    """The weight's dtype, if it is one of values: what replaces a linear layer to hold a weight in another format
    knows itself what to do with `x`. Of what has no weight, and of one that is computed at each look, it is that
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
        self, dim: int, hidden: int, *, activation: str = "swiglu", gated: bool = False,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(dim=dim, hidden=hidden)
        check_flags(gated=gated)
        check_activation(activation, " of shared experts")
        self.name = activation
        width = 2 * hidden if activation_of(activation).gated else hidden
        self.up = nn.Linear(dim, width, bias=False, dtype=dtype, device=device)
        self.down = nn.Linear(hidden, dim, bias=False, dtype=dtype, device=device)
        self.gate = nn.Linear(dim, 1, bias=False, dtype=dtype, device=device) if gated else None

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] in x's dtype, computed in the parameters' dtype or autocast's."""
        x = x_TD.to(_stored_in(self.up, x_TD))
        y: Tensor = self.down(activate(self.up(x), self.name))
        return (y if self.gate is None else y * self.gate(x).sigmoid()).to(x_TD.dtype)
