"""Adapters as parameters of the modules that they adapt.

    a  [E, r, in], or [1, r, in] of factors that all experts share        drawn as `nn.Linear` draws itself
    b  [E, *out, r], or [1, *out, r]                                     zeros, so that nothing changes at first

with `out` and `in` as the weight has them: gate_up [E, 2, F, D], up [E, F, D], down [E, D, F], weight [G, out, in].

Legend: E experts, G groups, D model dim, F expert hidden dim, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.experts.weight import LoraFactors, stack_factors


class ExpertAdapter(nn.Module):
    """One adapter of one module: parameters `<weight>_a` and `<weight>_b` for each weight that has one.

    Args:
        weights: shape and dtype of the module's by name, of all experts.
        device: of the parameters.
        rank, scale: r, and what the product is multiplied by.
        shared: whether all experts have one pair of factors.
        dropout: of the rows that go into `a`, in training.
    """

    def __init__(
        self, weights: Mapping[str, tuple[Sequence[int], torch.dtype]], device: torch.device, *, rank: int,
        scale: float, shared: bool, dropout: float, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank, self.scale, self.shared, self.dropout = rank, scale, shared, dropout
        self.names = tuple(weights)
        for name, (shape, own) in weights.items():
            experts, *out, width = shape
            experts = 1 if shared else experts
            for kind, sizes in (("a", (experts, rank, width)), ("b", (experts, *out, rank))):
                new = torch.empty(sizes, dtype=dtype or own, device=device)
                self.register_parameter(f"{name}_{kind}", nn.Parameter(new))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """See the module's head."""
        for name in self.names:
            a, b = self.get_parameter(f"{name}_a"), self.get_parameter(f"{name}_b")
            bound = 1 / math.sqrt(a.shape[-1])
            a.uniform_(-bound, bound)
            b.zero_()

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{', '.join(self.names)}, rank={self.rank}, scale={self.scale:g}{', shared' * self.shared}"


def in_use(module: Any) -> list[ExpertAdapter]:
    """The adapters that are active, in the order in which they were named."""
    return [module.get_submodule(f"adapters.{name}") for name in module.active_adapters]


def factors_of(
    module: Any, adapters: Sequence[ExpertAdapter], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, LoraFactors | None]:
    """The sum of a module's adapters by the weights' names, their parameters as this rank computes with them."""
    found: dict[str, list[LoraFactors]] = {name: [] for name in module.adaptable}
    for adapter, params in zip(adapters, parts, strict=True):
        for name in adapter.names:
            dropout = adapter.dropout if module.training else 0.0
            a, b = (params[f"{name}_{kind}"] for kind in "ab")
            found[name].append(LoraFactors(a=a, b=b.flatten(1, -2), scale=adapter.scale, dropout=dropout))
    return {name: stack_factors(each) for name, each in found.items()}
