"""LoRA adapters: parameters of the modules that they adapt, which a model's experts are given and rid of.

    a  [E, r, in], or [1, r, in] of factors that all experts share        drawn as `nn.Linear` draws itself
    b  [E, *out, r], or [1, *out, r]                                     zeros, so that nothing changes at first

with `out` and `in` as the weight has them: gate_up [E, 2, F, D], up [E, F, D], down [E, D, F], weight [G, out, in].

Legend: E experts, G groups, D model dim, F expert hidden dim, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.experts.weight import GroupedWeight, LoraFactors
from trimtab.validation import check_dtype, check_flags, check_sizes

WHOLE = 8
"""Ranks are filled up to a multiple with zeros: products on a GPU take rows of 16 bytes."""


class ExpertAdapter(nn.Module):
    """One adapter of one module: parameters `<weight>_a` and `<weight>_b` for each weight that has one.

    Args:
        weights: shape and dtype of the module's by name, of all experts.
        device: of the parameters.
        rank, scale: r, and what the product is multiplied by.
        shared: whether all experts have one pair of factors.
        dropout: of the rows that go into `a`, in training.
    """

    def __init__(
        self, weights: Mapping[str, tuple[Sequence[int], torch.dtype]], device: torch.device, *, rank: int,
        scale: float, shared: bool, dropout: float, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank, self.scale, self.shared, self.dropout = rank, scale, shared, dropout
        self.names = tuple(weights)
        for name, (shape, own) in weights.items():
            experts, *out, width = shape
            experts = 1 if shared else experts
            for kind, sizes in (("a", (experts, rank, width)), ("b", (experts, *out, rank))):
                new = torch.empty(sizes, dtype=dtype or own, device=device)
                self.register_parameter(f"{name}_{kind}", nn.Parameter(new))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """See the module's head."""
        for name in self.names:
            a, b = self.get_parameter(f"{name}_a"), self.get_parameter(f"{name}_b")
            bound = 1 / math.sqrt(a.shape[-1])
            a.uniform_(-bound, bound)
            b.zero_()

    def extra_repr(self) -> str:
        return f"{', '.join(self.names)}, rank={self.rank}, scale={self.scale:g}{', shared' * self.shared}"


def in_use(module: Any) -> list[ExpertAdapter]:
    """The adapters that are active, in the order in which they were named."""
    return [module.adapters[name] for name in module.active_adapters]


def factors_of(
    module: Any, adapters: Sequence[ExpertAdapter], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, LoraFactors | None]:
    """The sum of a module's adapters by the weights' names, their parameters as this rank computes with them."""
    found: dict[str, list[LoraFactors]] = {name: [] for name in module.adaptable}
    for adapter, params in zip(adapters, parts, strict=True):
        for name in adapter.names:
            dropout = adapter.dropout if module.training else 0.0
            a, b = (params[f"{name}_{kind}"] for kind in "ab")
            found[name].append(LoraFactors(a=a, b=b.flatten(1, -2), scale=adapter.scale, dropout=dropout))
    return {name: stack_factors(each) for name, each in found.items()}


def filled(weight: GroupedWeight) -> GroupedWeight:
    """With factors for each group, of a rank that products take; their gradients flow back by autograd."""
    lora = weight.lora
    if lora is None:
        return weight
    a, b, more = lora.a, lora.b, -lora.rank % WHOLE
    if not more and a.shape[0] == b.shape[0] == weight.groups:
        return weight
    if more:
        a, b = torch.nn.functional.pad(a, (0, 0, 0, more)), torch.nn.functional.pad(b, (0, more))
    a, b = (t.expand(weight.groups, -1, -1) for t in (a, b))
    return replace(weight, lora=replace(lora, a=a, b=b))


def seed_of(*weights: GroupedWeight) -> Tensor | None:
    """What dropout's masks of a call are made of, drawn from the default generator; None where nothing is dropped."""
    if not any(weight.lora is not None and weight.lora.dropout for weight in weights):
        return None
    return torch.randint(1 << 60, (), device="cpu")


def stack_factors(factors: Sequence[LoraFactors]) -> LoraFactors | None:
    """One pair of factors that gives the sum of all; None of none. dropout: the largest."""
    if len(factors) < 2:
        return next(iter(factors), None)
    groups = max(max(f.a.shape[0], f.b.shape[0]) for f in factors)
    scale = factors[0].scale
    a = torch.cat([f.a.expand(groups, -1, -1) for f in factors], 1)
    b = torch.cat([(f.b if f.scale == scale else f.b * (f.scale / scale)).expand(groups, -1, -1) for f in factors], 2)
    return LoraFactors(a=a, b=b, scale=scale, dropout=max(f.dropout for f in factors))


def experts_last(factor: Tensor) -> bool:
    """Whether a factor [e, out, r] lies in memory as [out, r, e], as peft's b does: what turns it as a matrix
    [out * r, e] takes a third of the time of a copy that is left to strides."""
    e, _, r = factor.shape
    return factor.stride() == (1, r * e, e) and not factor.is_contiguous()


def experts_first(factor: Tensor, out: Tensor) -> Tensor:
    """`factor` into `out`, contiguous and perhaps of another dtype."""
    if not experts_last(factor):
        return out.copy_(factor)
    flat = factor.permute(1, 2, 0).reshape(-1, factor.shape[0]).to(out.dtype)
    out.view(factor.shape[0], -1).copy_(flat.t())
    return out


def lying_as(value: Tensor, like: Tensor) -> Tensor:
    """A contiguous [e, out, r], with the strides of `like` if experts come last there: its views cost nothing then."""
    if not experts_last(like):
        return value
    e, out, r = value.shape
    return value.view(e, -1).t().contiguous().view(out, r, e).permute(2, 0, 1)


def modules_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Those that take adapters, see `GroupedModule.put_adapter`. Wrappers that forward attributes are none."""
    return ((name, module) for name, module in model.named_modules() if hasattr(type(module), "put_adapter"))


def add_adapter(
    model: nn.Module, name: str = "default", *, rank: int, alpha: float | None = None,
    weights: Sequence[str] | None = None, shared: bool = False, dropout: float = 0.0, rank_stabilized: bool = False,
    dtype: torch.dtype | None = None,
) -> list[nn.Parameter]:  # fmt: skip
    """Give every `ExpertMLP` and `GroupedLinear` in the model a new adapter (LoRA), make it the active one, and freeze
    their weights; other adapters stay trainable. Before or after `parallelize`; before `fully_shard_moe`, `ddp` and the
    optimizer.

    Args:
        model: any that has such layers.
        name: of the adapter; a new one.
        rank: r, the width of the adapter.
        alpha: the scale is alpha / r; 2 r if not given.
        weights: names among "gate_up", "up", "down" and "weight"; all that a module has if not given.
        shared: one pair for all experts of a layer.
        dropout: of the rows that go into `a`, in training.
        rank_stabilized: the scale is alpha / sqrt(r).
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
    chosen: list[tuple[Any, list[str]]] = []
    for path, module in modules_of(model):
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
    modules = [module for _, module in modules_of(model) if hasattr(module, "adapters")]
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
    modules = [module for _, module in modules_of(model) if name in getattr(module, "adapters", ())]
    if not modules:
        raise ConfigError(f"no adapter {name!r} in {type(model).__name__}")
    if any(getattr(module, "codes", None) is not None for module in modules):
        raise ConfigError("experts of codes take no delta: nothing was merged")
    merged = 0
    for module in modules:
        adapter = module.get_submodule(f"adapters.{name}")
        assert isinstance(adapter, ExpertAdapter)
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
