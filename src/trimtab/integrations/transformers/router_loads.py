"""Loads of whatever routers a model has, those of transformers and trimtab's own, counted while it trains.

Legend: T tokens, B sequences, L positions, E experts, K experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.backward import in_backward, not_in_graphs
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers import RouterPlace, find_routers, plain
from trimtab.routing.decision import Routing
from trimtab.routing.loads import LoadCounts
from trimtab.routing.recompute import replaying
from trimtab.routing.router import Router


class FirstRuns:
    """Which runs of one module are to be counted: those that train, with gradients, and each once under recompute. Of a
    reentrant checkpoint that is the second run, for the first one has no gradients."""

    def __init__(self) -> None:
        self._had_forward = False

    def here(self, module: nn.Module) -> bool:
        """Whether the run that is under way is one."""
        if not module.training or not torch.is_grad_enabled() or replaying():
            return False
        if in_backward():
            return not self._had_forward
        self._had_forward = True
        return True


class RealTokens:
    """Which tokens of a model's forward are no padding, as its 2-d `attention_mask` says."""

    def __init__(self, model: nn.Module) -> None:
        self._mask_T: Tensor | None = None
        self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _model: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self._mask_T = mask.flatten().bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def among(self, tokens: int) -> Tensor | None:
        """Bool [T]; None where all are real, or a router sees others than those of the mask (of an image, say)."""
        return None if self._mask_T is None or self._mask_T.numel() != tokens else self._mask_T

    def remove(self) -> None:
        """Look no longer."""
        self._hook.remove()


class RouterLoads(LoadCounts):
    """Counts what a model's routers decide in training: slots per expert, and slots that were dropped.

    Behind each router a hook sees what it gives, whoever decided it (a replay, a selection bias).

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
        self._first = {name: FirstRuns() for name in sizes}
        self._tokens = RealTokens(model)
        # First among the hooks: transformers' own for expert parallelism makes ids local.
        self._hooks = [place.module.register_forward_hook(partial(self._see, place), prepend=True) for place in places]
        self._hooks += [router.register_forward_hook(partial(self._see_own, name)) for name, router in own.items()]

    @not_in_graphs
    def _see(self, place: RouterPlace, module: nn.Module, _args: tuple[Any, ...], outputs: Any) -> None:
        if self._first[place.name].here(module):
            ids_TK = place.rule.read(module, outputs)[2]
            self.real = self._tokens.among(ids_TK.shape[0])
            self.count(place.name, ids_TK)

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
        self._tokens.remove()
        for hook in self._hooks:
            hook.remove()
