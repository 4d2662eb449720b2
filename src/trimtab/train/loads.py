"""How evenly the router loads the experts, counted where its decision enters each MoE layer, and the loss on it.

A pre-hook on every experts module of a transformers model adds this rank's choices to one counter on the device:
no host sync per layer. The counters of all layers lie in one vector, summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.backward import in_backward
from trimtab.convert.layouts import experts_modules
from trimtab.errors import ConfigError
from trimtab.routing.balance import max_vio
from trimtab.routing.scores import count_ids


class LoadCounter:
    """Counts tokens per (layer, expert) from now on.

    Args:
        model: a transformers model, sharded or not.
        num_experts: global number of experts of each layer, by module name (sharding changes the module's own).
        device: where the counters live.

    Attributes:
        real: which tokens of the next forward are no padding, bool [tokens]; all of them if None.
        top_k: experts per token, once there was a forward.
    """

    def __init__(self, model: nn.Module, num_experts: dict[str, int], device: torch.device) -> None:
        modules = experts_modules(model)
        self.names = list(modules)
        self.sizes = [num_experts[name] for name in self.names]
        self.real: Tensor | None = None
        self.top_k = 0
        self._batch = torch.zeros(sum(self.sizes), dtype=torch.int64, device=device)
        self._counts = self._batch.clone()
        for module, view in zip(modules.values(), torch.split(self._batch, self.sizes), strict=True):
            module.register_forward_pre_hook(self._hook(view), with_kwargs=True)

    def _hook(self, view: Tensor) -> Any:
        def count(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if in_backward():  # a recomputation: these tokens have been counted
                return
            ids = (args[1] if len(args) > 1 else kwargs["top_k_index"]).detach().long()
            self.top_k = ids.shape[-1]
            if self.real is not None:
                ids = ids.masked_fill(~self.real[:, None], -1)
            view.add_(count_ids(ids, view.numel()))

        return count

    def end_batch(self) -> Tensor:
        """This rank's counts of the forward that has ended, int64, all layers end to end."""
        batch = self._batch.clone()
        self._counts += batch
        self._batch.zero_()
        return batch

    def take(self) -> Tensor:
        """This rank's counts of the forwards that have ended since the last call, as `end_batch` gives them."""
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


def load_metrics(tokens_per_expert: list[int]) -> dict[str, Any]:
    """One layer's record: `max_vio` = (max load - mean load) / mean load, `dead_experts`, `tokens_per_expert`."""
    return {
        "max_vio": max_vio(torch.tensor(tokens_per_expert)),
        "dead_experts": tokens_per_expert.count(0),
        "tokens_per_expert": tokens_per_expert,
    }


def balance_loss(
    router_logits: Sequence[Tensor], counter: LoadCounter, counts: Tensor, all_sum: Callable[[Tensor], Tensor]
) -> Tensor:
    """The balance loss of softmax routers over a batch of all ranks, the mean over the layers, a float32 scalar.

    Per layer it is E * K * sum_e f_e p_e: f_e the share of the tokens' K choices that ran on expert e, whatever bias
    chose them, p_e its mean probability; K when the load is even. f carries no gradient, so f of the whole batch with
    each rank's own p has, averaged over the ranks, exactly the gradient of a single process: the layout of the ranks
    changes nothing. transformers' own loss takes f and p over all layers together, which lets one layer's load make up
    for another's; with one layer it is the same. Raises ConfigError where logits are of other layers than experts.

    Args:
        router_logits: per layer, [tokens, experts] of this rank.
        counts: what `end_batch` of the counter gave for this batch.
        all_sum: sums a tensor over the ranks; called once.
    """
    if [logits.shape[-1] for logits in router_logits] != counter.sizes:
        raise ConfigError(
            f"router logits of {len(router_logits)} layers, but {len(counter.sizes)} with experts: no balance loss can "
            "be taken; set router_aux_loss_coef to 0 in config.json"
        )
    real = torch.ones_like(router_logits[0][:, 0]) if counter.real is None else counter.real
    alike = torch.stack([real.sum(), torch.ones_like(real.sum())]).to(counts)  # tokens, ranks
    *summed, (tokens, ranks) = torch.split(all_sum(torch.cat([counts, alike])), [*counter.sizes, 2])
    losses = [
        size * counter.top_k * (count / count.sum() * (F.softmax(logits.float(), dim=-1) * real[:, None]).sum(0)).sum()
        for size, count, logits in zip(counter.sizes, summed, router_logits, strict=True)
    ]
    loss: Tensor = torch.stack(losses).mean() * ranks / tokens
    return loss
