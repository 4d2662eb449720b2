"""Which modules FSDP2 shards as units of their own, beside experts and the model: known before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from trimtab.errors import ConfigError
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.moe import ParallelMoE
from trimtab.parallel.plan import matches
from trimtab.routing.bias import routers
from trimtab.routing.router import Router


def find_units(model: nn.Module, blocks: Sequence[str], ignored: Collection[nn.Parameter] = ()) -> list[nn.Module]:
    """The modules that match, and routers of another dtype than what they would be sharded with; inner ones first.

    FSDP2 takes trained parameters of one dtype in a unit, and a router is float32 beside bfloat16. ignored: parameters
    that are not sharded.

    Raises:
        ConfigError: a pattern that matches nothing, experts, a container or what is sharded already; a unit inside a
            layer whose tokens are spread over a tp_mesh; a unit of several dtypes.
    """
    names = {module: name for name, module in model.named_modules()}
    chosen: set[nn.Module] = set()
    for pattern in blocks:
        found = [module for module, name in names.items() if name and matches(name, pattern)]
        if not found:
            raise ConfigError(f"blocks pattern {pattern!r} matches no module of {type(model).__name__}")
        chosen.update(found)
    experts = {inside for module in names if isinstance(module, ParallelExperts) for inside in module.modules()}
    for module, name in names.items():
        if module in chosen or module is model:
            _check_alone(module, f"block {name!r}" if name else "the model", module in experts)
    sharded = [module for module in names if module in experts or isinstance(module, FSDPModule)]
    elsewhere = {*ignored, *(param for module in sharded for param in module.parameters())}
    apart = _routers_apart(model, chosen, elsewhere)
    units = _inner_first(module for module in names if module in chosen or module in apart)
    for layer, name in names.items():
        if isinstance(layer, ParallelMoE) and layer.tp_group is not None:
            _check_summed(layer, name, {module: names[module] for module in units}, apart)
    for held in _held(model, units, elsewhere):
        kinds = {param.dtype: name for name, param in held.items()}
        if len(kinds) > 1:
            said = ", ".join(f"{name} is {dtype}" for dtype, name in kinds.items())
            raise ConfigError(
                f"trained parameters of one unit have one dtype, but {said}: name modules in blocks so that they part, "
                "or build all in one dtype and let mp_policy's param_dtype cast it"
            )
    return units


def _check_alone(module: nn.Module, what: str, of_experts: bool) -> None:
    """What torch would refuse once others are sharded."""
    if isinstance(module, FSDPModule):
        raise ConfigError(f"{what} is sharded already")
    if of_experts:
        raise ConfigError(f"{what}: experts are sharded over efsdp_mesh, on their own. Leave them out of blocks")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ConfigError(f"{what} is a {type(module).__name__}, which is never called: shard the modules in it")


def _check_summed(layer: ParallelMoE, name: str, units: dict[nn.Module, str], apart: Collection[nn.Module]) -> None:
    """A unit inside would gather its parameters after the layer has put others in their place, which sum gradients."""
    for inside in layer.modules():
        if inside is layer or inside not in units or not any(param.requires_grad for param in inside.parameters()):
            continue
        if inside in apart:
            problem = f"{units[inside]} has another dtype than the rest"
            remedy = "Build all in float32 and let mp_policy's param_dtype cast it, or cast the router as well"
        else:
            problem = f"block {units[inside]!r} is a part of it"
            remedy = "Name the layer in its place, or what it is in"
        raise ConfigError(
            f"a layer whose tokens are spread over tp_mesh is sharded whole, and {problem}. {remedy}", layer=name
        )


def _inner_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """What lies in another has fewer modules."""
    return sorted(modules, key=lambda module: sum(1 for _ in module.modules()))


def _held(
    model: nn.Module, units: Iterable[nn.Module], elsewhere: Collection[nn.Parameter]
) -> list[dict[str, nn.Parameter]]:
    """The trained parameters of each unit by name, without those of units in it; the model's own come last."""
    names, seen, held = {param: name for name, param in model.named_parameters()}, set(elsewhere), []
    for unit in (*_inner_first(units), model):
        held.append({names[p]: p for p in unit.parameters() if p.requires_grad and p not in seen})
        seen.update(held[-1].values())
    return held


def _routers_apart(
    model: nn.Module, chosen: Collection[nn.Module], elsewhere: Collection[nn.Parameter]
) -> set[nn.Module]:
    """The routers that are no units yet, and have another dtype than the rest of theirs."""
    found: list[Router] = [router for router in routers(model).values() if router not in chosen]
    routers_of = {param: router for router in found for param in router.parameters()}
    apart: set[nn.Module] = set()
    for held in _held(model, chosen, elsewhere):
        rest = {param.dtype for param in held.values() if param not in routers_of}
        if len({param.dtype for param in held.values()}) > 1:
            apart.update(routers_of[p] for p in held.values() if p in routers_of and {p.dtype} != rest)
    return apart
