"""How evenly the router loads the experts, counted where the routing decision enters each MoE layer.

A pre-hook on every experts module of a transformers model adds this rank's choices to one counter on the device:
no host sync per layer. The counters of all layers lie in one vector, summed over the ranks once a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trimtab.backward import in_backward
from trimtab.convert.layouts import experts_modules
from trimtab.routing.bias import max_vio
from trimtab.routing.scores import count_ids


class LoadCounter:
    """Counts tokens per (layer, expert) from now until `close`.

    Args:
        model: a transformers model, sharded or not.
        num_experts: global number of experts of each layer, by module name (sharding changes the module's own).
        device: where the counters live.
    """

    def __init__(self, model: nn.Module, num_experts: dict[str, int], device: torch.device) -> None:
        modules = experts_modules(model)
        self.names = list(modules)
        self.sizes = [num_experts[name] for name in self.names]
        self._counts = torch.zeros(sum(self.sizes), dtype=torch.int64, device=device)
        self._views = torch.split(self._counts, self.sizes)
        self._hooks = [
            module.register_forward_pre_hook(self._hook(view), with_kwargs=True)
            for module, view in zip(modules.values(), self._views, strict=True)
        ]

    @staticmethod
    def _hook(view: torch.Tensor) -> Any:
        def count(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if in_backward():  # a recomputation: these tokens have been counted
                return
            ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
            view.add_(count_ids(ids.detach().long(), view.numel()))

        return count

    def take(self) -> torch.Tensor:
        """This rank's counts since the last call, int64, all layers end to end."""
        taken = self._counts.clone()
        self._counts.zero_()
        return taken

    def split(self, summed: list[float]) -> dict[str, list[int]]:
        """Tokens per expert by layer name, from the sum of what the ranks' `take` gave."""
        layers, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            layers[name] = [round(count) for count in summed[start : start + size]]
            start += size
        return layers

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()


def load_metrics(tokens_per_expert: list[int]) -> dict[str, Any]:
    """One layer's record: `max_vio` = (max load - mean load) / mean load, `dead_experts`, `tokens_per_expert`."""
    return {
        "max_vio": max_vio(torch.tensor(tokens_per_expert)),
        "dead_experts": tokens_per_expert.count(0),
        "tokens_per_expert": tokens_per_expert,
    }
