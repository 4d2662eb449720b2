"""The bias that joins a router's scores for the selection alone: a family's own, or one that is added to its routers.

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trimtab.convert.files import SafetensorsFolder
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import RouterPlace
from trimtab.routing.observers import ADDED

_LOOKS_UP = ("DeepseekV4HashRouter",)
"""Routers that look experts up by the token's id: nothing is selected by scores."""


class HeldBias:
    """One router's selection bias, in float32 whatever the model's dtype: its steps are below bfloat16's resolution.

    A family's own buffer becomes float32 in the model; a parameter, of which the model may hold a shard, keeps its
    dtype, and what it rounds off is kept here.
    """

    def __init__(self, place: RouterPlace) -> None:
        self.place = place
        self._owner, self._name = (place.bias_in, place.bias) if place.bias else (place.module, ADDED)
        held = self._held()
        if not isinstance(held, nn.Parameter) and held.dtype != torch.float32:
            setattr(self._owner, self._name, held.float())
        self._wide: Tensor | None = None
        if self._held().dtype != torch.float32:
            self._wide = self.read()

    def _held(self) -> Tensor:
        held: Tensor = getattr(self._owner, self._name)
        return held

    def read(self) -> Tensor:
        """[E] float32."""
        if self._wide is not None:
            return self._wide
        held = self._held().detach()
        return (held.full_tensor() if isinstance(held, DTensor) else held).flatten().float()

    @torch.no_grad()
    def write(self, bias_E: Tensor) -> None:
        """Put it into the model."""
        held = self._held()
        if self._wide is not None:
            self._wide = bias_E
        shaped = bias_E.view(held.shape).to(held.dtype)
        held.copy_(
            distribute_tensor(shaped, held.device_mesh, held.placements) if isinstance(held, DTensor) else shaped
        )


def add_selection_bias(places: list[RouterPlace], saved: Path | None) -> None:
    """Give routers that have no selection bias a buffer of that name, by which the observer `SelectionBias` decides. It
    is saved with the model.

    saved: a model's folder whose biases are taken; else those that routers have, or zeros.

    Raises:
        ConfigError: a router that limits its choice to groups of experts, or a folder without the biases.
    """
    store = None if saved is None else SafetensorsFolder(saved)
    # Families save blocks under other names than they have in the model; the numbers of layers are the same.
    stored = {_numbers(name): name for name in store.infos if name.endswith(f".{ADDED}")} if store else {}
    for place in places:
        if place.bias or place.family in _LOOKS_UP:
            continue
        _check_groups(place, "a selection bias cannot be added to")
        name = stored.get(_numbers(place.name), "")
        if store is not None and not name:
            raise ConfigError(f"{saved} has no {ADDED} of {place.name}: it was not saved with one that was added")
        device = next(place.module.parameters()).device
        if store is not None or not hasattr(place.module, ADDED):
            bias = torch.zeros(place.num_experts) if store is None else store.read([name])[name].float()
            place.module.register_buffer(ADDED, bias.to(device))


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part.isdecimal())


def check_quantile(place: RouterPlace) -> None:
    """Raises:
    ConfigError: scores that may be above 1, groups of experts, or nothing to choose.
    """
    _check_groups(place, 'bias="quantile" cannot balance')
    if place.rule.score not in ("softmax", "sigmoid") or place.top_k >= place.num_experts:
        raise ConfigError(
            f'{place.name} ({place.family}): bias="quantile" is for scores by softmax or sigmoid, of more experts than '
            'a token takes; bias="sign" takes any'
        )


def _check_groups(place: RouterPlace, what: str) -> None:
    groups, best = getattr(place.module, "num_group", None) or 1, getattr(place.module, "topk_group", None) or 1
    if groups > best:
        raise ConfigError(
            f"{place.name} ({place.family}): {what} routers that choose within {best} of {groups} groups of experts"
        )
