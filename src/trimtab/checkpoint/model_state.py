"""A model's tensors by the names that its modules give them, whatever wraps it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.checkpoint.folder import MODEL
from trimtab.errors import InputError
from trimtab.experts.module import ExpertMLP

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_MARKS = ("_apply_gate", "has_gate", "num_experts")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP and torch.compile; FSDP2 wraps nothing."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        assert isinstance(inner, nn.Module)
        model = inner
    return model


def plain_name(name: str) -> str:
    """A module's or parameter's name without what compiling and activation checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by key, sharing the model's memory.

    Raises:
        InputError: state that is no tensor, or has no memory yet (meta).
    """
    found: dict[str, Tensor] = {}
    for name, value in unwrapped(model).state_dict().items():
        if not isinstance(value, Tensor) or value.is_meta:
            what = "on the meta device: materialise the model" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"{name} is {what}; a checkpoint is made of tensors")
        found[MODEL + plain_name(name)] = value
    return found


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The name of each parameter; of one that has several, the first."""
    return {param: plain_name(name) for name, param in unwrapped(model).named_parameters()}


def is_transformers_experts(module: nn.Module) -> bool:
    """Whether a module runs through transformers' experts registry: it has what is set on those, and on no others."""
    return all(hasattr(module, mark) for mark in _MARKS)


def expert_shapes(model: nn.Module) -> dict[str, dict[str, list[int]]]:
    """Global shapes of the parameters of each experts module, ours and transformers'."""
    found = {}
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, ExpertMLP) or is_transformers_experts(module):
            shapes = {own: list(param.shape) for own, param in module.named_parameters(recurse=False)}
            found[plain_name(name)] = shapes
    return found


def give_new_buffers(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Hand tensors that could not be filled in place to the modules, by torch's own way of loading."""
    if tensors:
        inner: Any = unwrapped(model)
        own = {plain_name(name): name for name in inner.state_dict()}
        inner.load_state_dict({own[key.removeprefix(MODEL)]: t for key, t in tensors.items()}, strict=False)


def fits_another_width(tensor: Tensor, size: torch.Size) -> bool:
    """Whether a buffer takes its width from what is loaded: those that are empty until their module is first used."""
    return not isinstance(tensor, nn.Parameter) and tensor.dim() == len(size) and 0 in (tensor.numel(), size.numel())
