"""Counts what replicas of hot experts do for a model's layers while it trains, on the device, until it is reported.

Legend: L layers, P ranks of an expert group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.autograd import not_in_graphs
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.integrations.transformers.routers.find import plain
from trimtab.moe import MoE
from trimtab.routing.port import CountOnce


def replicating_dispatchers(model: nn.Module) -> dict[str, tuple[nn.Module, Dispatcher]]:
    """The modules whose experts are copied where that pays, with their dispatchers, by the name of the MoE block."""
    from transformers.distributed.expert_parallel import EPImplementationInterface

    from trimtab.integrations.transformers.expert_parallel import TrimtabEP

    kinds = [kind for _, kind in EPImplementationInterface().items() if isinstance(kind, type)]
    ours = [ep for kind in kinds if issubclass(kind, TrimtabEP) for ep in getattr(kind, "living", ())]
    of_experts = {id(ep.experts): ep.dispatcher for ep in ours}
    found: dict[str, tuple[nn.Module, Dispatcher]] = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            found[plain(name)] = module, module.dispatcher
        elif id(module) in of_experts:
            found[_around(name)] = module, of_experts[id(module)]
    return {
        name: (module, dispatcher) for name, (module, dispatcher) in found.items() if dispatcher.replication is not None
    }


class ReplicaCounts:
    """Sums over the forwards that train, each counted once under recompute. No layer, no counts.

    names: of the MoE blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = replicating_dispatchers(model)
        self.names = list(layers)
        device = next(model.parameters()).device
        self._sums = torch.zeros(len(layers), 5, dtype=torch.int64, device=device)
        self._ranks = [dispatcher.ranks for _, dispatcher in layers.values()]
        self._hooks = [
            module.register_forward_hook(partial(self._see, sums, dispatcher, CountOnce()))
            for sums, (module, dispatcher) in zip(self._sums, layers.values(), strict=True)
        ]

    @not_in_graphs
    def _see(self, sums: Tensor, dispatcher: Dispatcher, runs: CountOnce, module: nn.Module, *_: Any) -> None:
        report, transport = dispatcher.replicated, dispatcher.transport
        if report is None or transport is None or not runs.here(module.training and torch.is_grad_enabled()):
            return
        before_P, after_P, mine = report.loads_before_P, report.loads_after_P, report.replicas_P[transport.rank]
        sums += torch.stack([before_P.amax(), after_P.amax(), before_P.sum(), mine, mine * report.replica_bytes])

    def reported(self) -> dict[str, dict[str, Any]]:
        """What all ranks have counted since the last call, by name. Every rank must call; one all-reduce.

        `busiest_before` and `busiest_after` are rows of the busiest rank over the mean, weighted by the calls' rows;
        `replicas` those of experts; `replica_bytes` of their weights, on their way out.
        """
        taken = self._sums.clone()
        self._sums.zero_()
        if self.names and dist.is_initialized():
            dist.all_reduce(taken)
        found = {}
        for name, ranks, counts in zip(self.names, self._ranks, taken.tolist(), strict=True):
            before, after, slots, replicas, size = counts
            found[name] = {
                "busiest_before": before * ranks / slots if slots else 1.0,
                "busiest_after": after * ranks / slots if slots else 1.0,
                "replicas": replicas,
                "replica_bytes": size,
            }
        return found

    def remove(self) -> None:
        """Count no longer."""
        for hook in self._hooks:
            hook.remove()


def with_replica_counts(
    layers: dict[str, dict[str, Any]], copied: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Records of `load_metrics` by the names of routers or of experts, each with its block's as "replicated"."""
    return {
        name: record | ({"replicated": copied[_around(name)]} if _around(name) in copied else {})
        for name, record in layers.items()
    }


def _around(name: str) -> str:
    """The block that a router or experts module is in, whatever wraps them."""
    return plain(name).rpartition(".")[0]
