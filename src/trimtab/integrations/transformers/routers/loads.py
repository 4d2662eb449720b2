"""Loads of whatever routers a model has, those of transformers and trimtab's own, counted while it trains.

Legend: E experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.autograd import not_in_graphs
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import find_routers, plain
from trimtab.integrations.transformers.routers.watch import FirstRuns, Look, Seen, Watch
from trimtab.routing.decision import Routing
from trimtab.routing.loads import LoadCounts
from trimtab.routing.router import Router


class RouterLoads(LoadCounts):
    """Counts what a model's routers decide in training: slots per expert, and slots that were dropped.

    It sees what each router gives, whoever decided it (a replay, a selection bias).

    Raises:
        ConfigError: the model has no router, or one whose decisions cannot be seen.
    """

    def __init__(self, model: nn.Module) -> None:
        places = find_routers(model)
        own = {plain(name): module for name, module in model.named_modules() if isinstance(module, Router)}
        sizes = {place.name: place.num_experts for place in places}
        sizes |= {name: router.config.num_experts for name, router in own.items()}
        if not sizes:
            raise ConfigError(f"no router in {type(model).__name__}: there are no loads to count")
        super().__init__(sizes, next(model.parameters()).device)
        self._dropped = torch.zeros(len(sizes), dtype=torch.int64, device=self._batch.device)
        self._first = {name: FirstRuns() for name in own}
        self._leave = [Watch.of(model, places).add(Look(self._see))] if places else []
        self._leave += [r.register_forward_hook(partial(self._see_own, name)).remove for name, r in own.items()]

    def _see(self, seen: Seen) -> None:
        if seen.first:
            self._of[seen.place.name].add_(seen.chosen_E.to(self._batch.device))

    @not_in_graphs
    def _see_own(self, name: str, module: nn.Module, _args: tuple[Any, ...], routing: Routing) -> None:
        if self._first[name].here(module) and routing.basis is not None:
            self._of[name].add_(routing.loads_E)
            self._dropped[self.names.index(name)] += routing.basis.chosen_E.sum() - routing.loads_E.sum()

    def take_all(self) -> Tensor:
        """As `take`, with the dropped slots of each layer behind."""
        self.end_batch()
        taken = torch.cat([self.take(), self._dropped])
        self._dropped.zero_()
        return taken

    def remove(self) -> None:
        """Count no longer."""
        for leave in self._leave:
            leave()
