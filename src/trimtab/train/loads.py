"""How evenly the router loads the experts, counted where its decision enters each MoE layer, and the loss on it.

A pre-hook on every experts module of a transformers model adds this rank's choices to `LoadCounts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.autograd import in_backward
from trimtab.convert.layouts import experts_modules
from trimtab.errors import ConfigError
from trimtab.routing.loads import LoadCounts


class LoadCounter(LoadCounts):
    """Counts tokens per (layer, expert) from now on.

    Args:
        model: a transformers model, sharded or not.
        num_experts: global number of experts of each layer, by module name (sharding changes the module's own).
        device: where the counts live.
    """

    def __init__(self, model: nn.Module, num_experts: dict[str, int], device: torch.device) -> None:
        modules = experts_modules(model)
        super().__init__({name: num_experts[name] for name in modules}, device)
        for name, module in modules.items():
            module.register_forward_pre_hook(partial(self._see, name), with_kwargs=True)

    def _see(self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not in_backward():  # a recomputation: these tokens have been counted
            self.count(name, args[1] if len(args) > 1 else kwargs["top_k_index"])


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
