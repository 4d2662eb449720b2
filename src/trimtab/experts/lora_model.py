"""A model's experts are given adapters, told which are active, and rid of them.

Legend: r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from trimtab.errors import ConfigError
from trimtab.experts.grouped_module import GroupedModule
from trimtab.experts.lora import ExpertAdapter
from trimtab.validation import check_dtype, check_flags, check_sizes


def _adapted(model: nn.Module) -> Iterator[tuple[str, GroupedModule]]:
    for name, module in model.named_modules():
        if isinstance(module, GroupedModule):
            yield name, module


def add_adapter(
    model: nn.Module,
    name: str = "default",
    *,
    rank: int,
    alpha: float | None = None,
    weights: Sequence[str] | None = None,
    shared: bool = False,
    dropout: float = 0.0,
    rank_stabilized: bool = False,
    dtype: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Give every `ExpertMLP` and `GroupedLinear` in the model a new adapter (LoRA), make it the active one, and freeze
    their weights; other adapters stay trainable. Before or after `parallelize`; before `fully_shard_moe`, `ddp` and the
    optimizer.

    Args:
        name: a new one.
        rank: r. alpha: the scale is alpha / r, or with `rank_stabilized` alpha / sqrt(r); 2 r if not given.
        weights: names among "gate_up", "up", "down" and "weight"; all that a module has if not given.
        shared: one pair for all experts of a layer.
        dropout: of the rows that go into `a`, in training.
        dtype: of the adapter's parameters; the weight's if not given.

    Returns:
        the new parameters. Every rank draws those of all experts: from one seed they are the same however experts lie.

    Raises:
        ConfigError: sizes or names that do not fit; no such module; a `GroupedLinear` with a recipe or `delay_wgrad`.
    """
    check_sizes(rank=rank)
    check_flags(shared=shared, rank_stabilized=rank_stabilized)
    check_dtype(dtype)
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout={dropout!r} must be at least 0 and below 1")
    if not name.isidentifier():
        raise ConfigError(f"an adapter's name is part of its parameters': {name!r} is no identifier")
    scale = (2 * rank if alpha is None else alpha) / (math.sqrt(rank) if rank_stabilized else rank)
    options = {"rank": rank, "scale": scale, "shared": shared, "dropout": dropout, "dtype": dtype}
    chosen: list[tuple[GroupedModule, list[str]]] = []
    for path, module in _adapted(model):
        own = [own for own in module.adaptable if weights is None or own in weights]
        if own and hasattr(module, "adapters") and name in module.adapters:
            raise ConfigError(f"there is an adapter {name!r} already", layer=path)
        chosen += [(module, own)] if own else []
    if not chosen:
        raise ConfigError(f"no module of {type(model).__name__} has weights {weights or ''} to adapt")
    for module, own in chosen:
        for param, tensor in module.named_parameters():
            if not param.startswith("adapters."):
                tensor.requires_grad_(False)
        module.put_adapter(name, own, options)
    return [param for module, _ in chosen for param in module.get_submodule(f"adapters.{name}").parameters()]


def set_adapter(model: nn.Module, *names: str) -> None:
    """Make these the active adapters, whose sum is added, wherever there are such; none: the base's bits.

    Only active ones have gradients: what an optimizer holds of the others it should skip, as it does where `.grad` is
    None.

    Raises:
        ConfigError: no module has an adapter of that name.
    """
    modules = [module for _, module in _adapted(model) if hasattr(module, "adapters")]
    known = {name for module in modules for name in module.adapters}
    if absent := [name for name in names if name not in known]:
        raise ConfigError(f"no adapter {', '.join(absent)}; there are {', '.join(sorted(known)) or 'none'}")
    for module in modules:
        module.active_adapters = tuple(name for name in names if name in module.adapters)


@torch.no_grad()
def merge_adapter(model: nn.Module, name: str) -> int:
    """Add an adapter's delta to the weights, in float32 at least, and take it out. Returns how many experts' weights of
    this rank were changed. No communication: each rank has what its part needs.

    Raises:
        ConfigError: no module has an adapter of that name.
    """
    modules = [module for _, module in _adapted(model) if name in getattr(module, "adapters", ())]
    if not modules:
        raise ConfigError(f"no adapter {name!r} in {type(model).__name__}")
    merged = 0
    for module in modules:
        adapter = module.get_submodule(f"adapters.{name}")
        assert isinstance(adapter, ExpertAdapter)
        if getattr(module, "codes", None) is not None:
            raise ConfigError("experts of codes take no delta: nothing was merged")
        for own in adapter.names:
            weight, a, b = map(module.own_part, (own, f"adapters.{name}.{own}_a", f"adapters.{name}.{own}_b"))
            for expert, value in enumerate(weight):
                wide = torch.promote_types(value.dtype, torch.float32)
                at = 0 if adapter.shared else expert
                delta = b[at].flatten(0, -2).to(wide) @ a[at].to(wide)
                value.copy_(value.to(wide) + adapter.scale * delta.view_as(value))
            merged += len(weight)
        module.active_adapters = tuple(other for other in module.active_adapters if other != name)
        del module.adapters[name]
    return merged
