"""The bias that joins a router's scores for the selection alone: a family's own, or one that is added to its routers.

Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trimtab.atomic_write import whole
from trimtab.convert.files import SafetensorsFolder
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import RouterPlace
from trimtab.routing.observers import ADDED

_LOOKS_UP = ("DeepseekV4HashRouter",)
"""Routers that look experts up by the token's id: nothing is selected by scores."""
_ADAPTER = "adapter_model.safetensors"


class HeldBias:
    """One router's selection bias, in float32 whatever the model's dtype: its steps are below bfloat16's resolution.

    A family's own buffer becomes float32 in the model; a parameter, of which the model may hold a shard, keeps its
    dtype, and what it rounds off is kept here, as long as nobody else writes to it.
    """

    def __init__(self, place: RouterPlace) -> None:
        self.place = place
        self.owner, self.name = (place.bias_in, place.bias) if place.bias else (place.module, ADDED)
        held = self.held()
        if not isinstance(held, nn.Parameter) and held.dtype != torch.float32:
            setattr(self.owner, self.name, held.float())
        self._written: Tensor | None = None

    def held(self) -> Tensor:
        """As the model has it."""
        held: Tensor = getattr(self.owner, self.name)
        return held

    def read(self) -> Tensor:
        """[E] float32. Of a shard all its ranks must call."""
        held = self.held().detach()
        full = (held.full_tensor() if isinstance(held, DTensor) else held).flatten()
        if self._written is None:
            return full.float()
        written = self._written.to(full.device)
        return torch.where(written.to(full.dtype) == full, written, full.float())

    @torch.no_grad()
    def write(self, bias_E: Tensor) -> None:
        """Put it into the model."""
        held, self._written = self.held(), bias_E
        new = bias_E.view(held.shape).to(held.dtype)
        held.copy_(distribute_tensor(new, held.device_mesh, held.placements) if isinstance(held, DTensor) else new)

    def to_save(self) -> Tensor | None:
        """In the model's shape, on this rank alone; None of a shard that has not been written to."""
        held = self.held()
        value = self._written if isinstance(held, DTensor) else self.read()
        return None if value is None else value.view(held.shape).cpu()


def add_selection_bias(places: list[RouterPlace], saved: Path | None) -> None:
    """Give routers that have no selection bias a buffer of that name, by which the observer `SelectionBias` decides. It
    is saved with the model.

    saved: the folder of a model or of an adapter whose biases are taken; else those that routers have, or zeros.

    Raises:
        ConfigError: a router that limits its choice to groups of experts, or a folder without the biases.
    """
    stored = {} if saved is None else _stored(saved)
    for place in places:
        if place.bias or place.family in _LOOKS_UP:
            continue
        _check_groups(place, "a selection bias cannot be added to")
        if saved is not None and _numbers(place.name) not in stored:
            raise ConfigError(f"{saved} has no {ADDED} of {place.name}: it was not saved with one that was added")
        device = next(place.module.parameters()).device
        if saved is not None or not hasattr(place.module, ADDED):
            bias = stored[_numbers(place.name)].float() if stored else torch.zeros(place.num_experts)
            place.module.register_buffer(ADDED, bias.to(device))


def _stored(folder: Path) -> dict[tuple[str, ...], Tensor]:
    """The added biases in a folder, by the numbers in their names: families save blocks under other names than they
    have in the model; the numbers of layers are the same."""
    if (folder / _ADAPTER).is_file():
        tensors = load_file(folder / _ADAPTER)
    else:
        store = SafetensorsFolder(folder)
        tensors = store.read([name for name in store.infos if name.endswith(f".{ADDED}")])
    return {_numbers(name): bias for name, bias in tensors.items() if name.endswith(f".{ADDED}")}


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


def save_with_peft(model: Any, biases: Iterable[HeldBias]) -> None:
    """`save_pretrained` of a model with adapters of peft puts the biases into their files too; peft reads them back.

    Raises:
        ConfigError: adapters, but no PeftModel.
    """
    names = {id(module): name for name, module in model.named_modules()}
    keys = {f"{names[id(bias.owner)]}.{bias.name}": bias for bias in biases}
    if not keys or not hasattr(model, "peft_config"):
        return
    if not hasattr(model, "get_base_model"):
        raise ConfigError(f"{type(model).__name__} has adapters: hand in the PeftModel around it, which saves them")
    model.save_pretrained = partial(_save_pretrained, model.save_pretrained, keys, model)


def check_saved(model: nn.Module) -> None:
    """Raises ConfigError where adapters came to the model behind `save_with_peft`."""
    if hasattr(model, "peft_config") and "save_pretrained" not in vars(model):
        raise ConfigError(
            "adapters came behind LoadBalancer, and would be saved without its biases: make it of the PeftModel that "
            "get_peft_model returns"
        )


def _save_pretrained(
    save: Callable[..., Any], keys: dict[str, HeldBias], model: Any, folder: str | Path, *args: Any, **options: Any
) -> Any:
    done = save(folder, *args, **options)
    if not options.get("is_main_process", True):
        return done
    # What peft saves whole has its bias among its tensors.
    found = {name: bias.to_save() for name, bias in keys.items() if ".modules_to_save." not in name}
    moved = {name: bias for name, bias in found.items() if bias is not None}
    files = [file for name in ("", *model.peft_config) if (file := Path(folder, name, _ADAPTER)).is_file()]
    if not files:
        raise ConfigError(f"{folder}: no {_ADAPTER}, and selection biases are saved there alone")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
        with whole(file) as unfinished:
            save_file(tensors | moved, unfinished, about)
    return done
