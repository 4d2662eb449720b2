"""What the routers of a model load its experts with while it trains, and what replicas of hot ones do about it: counted
on the device, until it is reported.

Legend: P ranks of an expert group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.autograd import not_in_graphs
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.integrations.transformers.routers.find import around, plain
from trimtab.integrations.transformers.routers.observe import Observed
from trimtab.moe import MoE
from trimtab.routing.losses import take_sums
from trimtab.routing.observers import Loads
from trimtab.routing.port import CountOnce, Observer


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
            found[around(name)] = module, of_experts[id(module)]
    return {name: (module, its) for name, (module, its) in found.items() if its.replication is not None}


class ModelLoads:
    """Sums over the forwards that train, each counted once under recompute.

    observers: of the same routers, until `remove` too.
    """

    def __init__(self, model: nn.Module, *observers: Observer) -> None:
        self._loads, layers = Loads(), replicating_dispatchers(model)
        self.observed = Observed(model, self._loads, *observers)
        device = next(model.parameters()).device
        self._replicas = {name: torch.zeros(5, dtype=torch.int64, device=device) for name in layers}
        self._ranks = {name: dispatcher.ranks for name, (_, dispatcher) in layers.items()}
        self._hooks = [
            module.register_forward_hook(partial(self._see, self._replicas[name], dispatcher, CountOnce()))
            for name, (module, dispatcher) in layers.items()
        ]

    @not_in_graphs
    def _see(self, sums: Tensor, dispatcher: Dispatcher, runs: CountOnce, module: nn.Module, *_: Any) -> None:
        report, transport = dispatcher.replicated, dispatcher.transport
        if report is None or transport is None or not runs.here(module.training and torch.is_grad_enabled()):
            return
        before_P, after_P, mine = report.loads_before_P, report.loads_after_P, report.replicas_P[transport.rank]
        sums += torch.stack([before_P.amax(), after_P.amax(), before_P.sum(), mine, mine * report.replica_bytes])

    def take(self, times: int) -> dict[str, dict[str, Any]]:
        """Records of `load_metrics` by layer, of what all ranks have counted since the last call. Every rank must call.
        times: how many ranks hold the same tokens.

        Where replicas are made, "replicated" has `busiest_before` and `busiest_after`, rows of the busiest rank over
        the mean, weighted by the calls' rows; and `replicas` of experts with the `replica_bytes` sent for them.
        """
        group = dist.group.WORLD if dist.is_initialized() else None
        records, replicated = self._loads.records(group, times), {}
        for name, sums in take_sums(self._replicas, group).items():
            before, after, slots, replicas, size = sums.tolist()
            even = slots / self._ranks[name]
            replicated[name] = {
                "busiest_before": before / even if slots else 1.0, "busiest_after": after / even if slots else 1.0,
                "replicas": replicas, "replica_bytes": size,
            }  # fmt: skip
        for name, record in records.items():
            if around(name) in replicated:
                record["replicated"] = replicated[around(name)]
        return records

    def remove(self) -> None:
        """Count no longer."""
        self.observed.remove()
        for hook in self._hooks:
            hook.remove()
