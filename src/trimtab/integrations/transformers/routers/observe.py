"""Observers of all routers that a model has: trimtab's, also those in the place of Megatron's, and transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import find_routers, plain
from trimtab.integrations.transformers.routers.forwards import names_of
from trimtab.integrations.transformers.routers.ports import ModelPorts
from trimtab.routing.port import Observer, Port, RouterInfo


class Observed:
    """Observers of a model's routers, until `remove`. The last one added has the last word on a decision.

    Args:
        model: with trimtab's, Megatron's or transformers' MoE layers, wrapped or not.
        observers: each of one model.

    Attributes:
        token_mask: bool [B, L] for the coming forwards of a transformers model: which tokens are no padding, where the
            arguments have no 2-d `attention_mask` that says so.

    Raises:
        ConfigError: no router, or one of transformers' that cannot be observed; what an observer does not take.
    """

    def __init__(self, model: nn.Module, *observers: Observer) -> None:
        places, own = find_routers(model), own_ports(model)
        self.routers = {port.info.name: port.info for port in own} | {place.name: place.info for place in places}
        if not self.routers:
            raise ConfigError(
                f"no Router in {type(model).__name__}: observers, record and replay are for models with trimtab's or "
                "transformers' MoE layers"
            )
        device = next(model.parameters()).device
        for observer in observers:
            observer.begin(self.routers, device)
        self._observers = observers
        self._model = ModelPorts.of(places) if places else None
        self._ports: list[Port] = [*own, *(self._model.ports(model, places) if self._model else ())]
        self._hooks: list[Any] = []
        if self._model is not None:
            begins = partial(self._model.pre_hook, id(model), names_of(model))
            self._hooks = [
                model.register_forward_pre_hook(begins, with_kwargs=True, prepend=True),
                model.register_forward_hook(partial(self._model.hook, id(model)), always_call=True),
            ]
            self._model.use()
        for port in self._ports:
            port.add(observers)

    @property
    def token_mask(self) -> Tensor | None:
        return None if self._model is None else self._model.token_mask

    @token_mask.setter
    def token_mask(self, mask: Tensor | None) -> None:
        if self._model is not None:
            self._model.token_mask = mask

    def remove(self) -> None:
        """The model runs as if these had never been."""
        for port in self._ports:
            port.remove(self._observers)
        for hook in self._hooks:
            hook.remove()
        if self._model is not None and self._ports:
            self._model.leave()
        self._ports = []


def own_ports(model: nn.Module) -> list[Port]:
    """Those that a module has as its attribute `port`, named by the module."""
    found = []
    for name, module in model.named_modules():
        port = getattr(module, "port", None)
        if isinstance(port, Port):
            info: RouterInfo = module.info
            port.info = replace(info, name=plain(name))
            found.append(port)
    return found


@contextmanager
def observing(model: nn.Module, *observers: Observer) -> Iterator[Observed]:
    """Adds observers to the model's routers, see `Observed`, and removes them at the end."""
    observed = Observed(model, *observers)
    try:
        yield observed
    finally:
        observed.remove()
