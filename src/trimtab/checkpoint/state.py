"""Tensors of a model and of its optimizer's state by the names that the modules give them, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

from trimtab.checkpoint.folder import MODEL, OPTIM
from trimtab.errors import ConfigError, InputError
from trimtab.experts.module import ExpertMLP

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_MARKS = ("_apply_gate", "has_gate", "num_experts")
HOW = frozenset({"params", "param_names", "rule", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a group that say how it is computed, not what: those of the optimizer at hand stay. rule: of our Muon."""

Groups = list[dict[str, Any]]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP and torch.compile; FSDP2 wraps nothing."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return model if inner is None else unwrapped(inner)


def plain_name(name: str) -> str:
    """A module's or parameter's name without what compiling and activation checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by key, sharing the model's memory.

    Raises:
        InputError: state that is no tensor, has no memory yet (meta), or is not reduced yet (Partial).
    """
    found: dict[str, Tensor] = {}
    for name, value in unwrapped(model).state_dict().items():
        if not isinstance(value, Tensor) or value.is_meta:
            what = "on the meta device: materialise the model" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"{name} is {what}; a checkpoint is made of tensors")
        if isinstance(value, DTensor) and any(isinstance(placement, Partial) for placement in value.placements):
            raise InputError(f"{name} is Partial over {value.device_mesh}: reduce it before it is saved")
        found[MODEL + plain_name(name)] = value
    return found


def is_transformers_experts(module: nn.Module) -> bool:
    """True for a module that runs through transformers' experts registry, by the attributes that it sets."""
    return all(hasattr(module, mark) for mark in _MARKS)


def expert_shapes(model: nn.Module) -> dict[str, dict[str, list[int]]]:
    """Global shapes of the parameters of each experts module, ours and transformers'."""
    found = {}
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, ExpertMLP) or is_transformers_experts(module):
            shapes = {own: list(param.shape) for own, param in module.named_parameters(recurse=False)}
            found[plain_name(name)] = shapes
    return found


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Groups]:
    """(tensors by key, groups for `Index.optimizer`).

    Raises:
        ConfigError: a parameter that is not of the model, or state that is neither tensor nor number, or a plain
            tensor where the parameter is a DTensor.
    """
    names, tensors, groups = _names(model, optimizer), {}, []
    for group in optimizer.param_groups:
        values: dict[str, dict[str, float]] = {}
        for param in group["params"]:
            for slot, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    if value.dim() and issubclass(type(param), DTensor) and not isinstance(value, DTensor):
                        raise ConfigError(
                            f"the optimizer's {slot} of {names[param]} is a plain tensor {tuple(value.shape)} and the "
                            "parameter a DTensor: which part of it this rank holds is not known"
                        )
                    tensors[f"{OPTIM}{names[param]}.{slot}"] = value
                elif isinstance(value, (int, float)):
                    values.setdefault(names[param], {})[slot] = value
                elif value is not None:
                    raise ConfigError(f"the optimizer's {slot} of {names[param]} is a {type(value).__name__}")
        options = {key: _to_json(value) for key, value in group.items() if key not in HOW}
        kept = {key: value for key, value in options.items() if value is not _UNKNOWN}
        params = [names[p] for p in group["params"]]
        groups.append({"kind": _kind(optimizer), "params": params, "options": kept, "values": values})
    return tensors, groups


def optimizer_targets(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], groups: Groups
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """(tensors to read into, by key; what then gives the optimizer its state and the groups' options). The optimizer is
    not touched before.

    Raises:
        ConfigError: parameters that only one of both has, an optimizer of another class, a group of parameters that
            had different options, or state that has no place yet and not its parameter's shape.
    """
    names, kind = _names(model, optimizer), _kind(optimizer)
    options = {name: group["options"] for group in groups for name in group["params"]}
    check_groups([[names[p] for p in group["params"]] for group in optimizer.param_groups], options)
    if kinds := {group["kind"] for group in groups} - {kind}:
        raise ConfigError(
            f"the checkpoint has the state of {', '.join(sorted(kinds))}, and the optimizer here is {kind}: make one "
            "of that class, or load the model without an optimizer"
        )
    kept: dict[str, dict[str, Any]] = {}
    for key, metadata in stored.items():
        if key.startswith(OPTIM):
            name, _, slot = key.removeprefix(OPTIM).rpartition(".")
            kept.setdefault(name, {})[slot] = metadata
    tensors: dict[str, Tensor] = {}
    slots = {name: dict(values) for group in groups for name, values in group["values"].items()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names[param]
            for slot, metadata in kept.get(name, {}).items():
                held = optimizer.state.get(param, {}).get(slot)
                tensor = _target(f"{name}.{slot}", param, held, metadata, group)
                tensors[f"{OPTIM}{name}.{slot}"] = slots.setdefault(name, {})[slot] = tensor

    @torch.no_grad()
    def put() -> None:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for key, value in (options[names[group["params"][0]]] if group["params"] else {}).items():
                held = group.get(key)
                if isinstance(held, Tensor):
                    held.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(held, tuple) else value
            optimizer.state.update({param: slots[names[param]] for param in group["params"] if names[param] in slots})

    return tensors, put


def check_groups(here: Sequence[Sequence[str]], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError where groups of names are not of the parameters that have `options` in a checkpoint, or one
    group's had different ones."""
    saved, own = set(options), {name for names in here for name in names}
    if saved != own:
        raise ConfigError(
            f"the optimizer has other parameters: {some(saved - own)} only in the checkpoint, {some(own - saved)} "
            "only here"
        )
    for first, name in ((names[0], name) for names in here for name in names):
        if options[name] != options[first]:
            raise ConfigError(
                f"one group of the optimizer holds {first} and {name}, which had other options in the checkpoint: "
                f"{options[first]} and {options[name]}"
            )


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The name of its class, or of the class of torch.optim which it derives from."""
    own = type(optimizer)
    known = (kind for kind in own.__mro__ if kind.__module__.startswith("torch.optim."))
    found = next(known, torch.optim.Optimizer)
    return own.__name__ if found is torch.optim.Optimizer else found.__name__


def _target(name: str, param: Tensor, held: Any, metadata: Any, group: Mapping[str, Any]) -> Tensor:
    size, dtype = metadata.size, metadata.properties.dtype
    if isinstance(held, Tensor) and held.size() == size and held.dtype == dtype:
        return held
    if size == param.size():
        return torch.zeros_like(param.detach(), dtype=dtype)
    if not size:  # Adam's count of steps: on the host, unless the kernels read it
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
    raise ConfigError(
        f"the optimizer's {name} is {tuple(size)} {dtype} in the checkpoint, and its layout is not known here: take a "
        "step before loading, so that the state exists"
    )


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The name of each parameter; of one that has several, the first."""
    names = {param: plain_name(name) for name, param in unwrapped(model).named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in names:
                raise ConfigError(
                    f"the optimizer holds a parameter {tuple(param.shape)} that is not of the model: make it after "
                    "parallelize, fully_shard_moe and the like"
                )
    return names


_UNKNOWN = object()


def _to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else _UNKNOWN
    if isinstance(value, (list, tuple)):
        return [_to_json(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN


def some(names: set[str] | set[int]) -> str:
    """The first three names, and how many more there are."""
    first = map(str, sorted(names)[:3])
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"
