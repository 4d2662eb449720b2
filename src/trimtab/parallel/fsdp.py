"""FSDP2 for models with MoE layers: experts on their own mesh, every gradient that of the mean loss.

    dense parameters    reduced over dp, divided by dp                        FSDP2's default
    experts             reduced over efsdp, divided by dp, not by efsdp       the exchange has summed the rest already

dp is the number of ranks (or tensor-parallel groups) that have tokens of their own: DP x CP.

With one rank to scatter to, FSDP2 (torch 2.11 to 2.15) divides twice by a module's factor in any dtype but float32 and
bfloat16. There an expert's gradient is scaled by efsdp / dp where it enters the layer, as `trimtab.parallel.ddp` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from trimtab.errors import ConfigError
from trimtab.parallel.expert_parallel import matches
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.meshes import check_meshes
from trimtab.parallel.moe import ParallelMoE, join_data_parallel
from trimtab.routing.bias import routers
from trimtab.routing.router import Router

DIVIDED_ONCE = (torch.float32, torch.bfloat16)
"""Types of a reduction in which FSDP2 divides once, whatever the mesh."""
SET_HERE = {"module", "mesh", "shard_placement_fn", "dp_mesh_dims"}
"""What the meshes say, and where experts are cut."""
Held = dict[str, nn.Parameter]


def fully_shard_moe(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    efsdp_mesh: DeviceMesh,
    *,
    blocks: Sequence[str] = (),
    **options: Any,
) -> FSDPModule:
    """`fully_shard` on the experts, on blocks and on the model, in place. Call after `parallelize`, on every rank.

    Args:
        dp_mesh: one dim, or (replicate, shard) for HSDP; its size is the data-parallel size, CP included: with
            context parallelism a mesh of all DP x CP ranks, or mesh["dp", "cp"], replicated over dp.
        efsdp_mesh: the ranks that hold the same experts, one dim or (replicate, shard); a slice of the mesh that the
            experts were parallelized on.
        blocks: patterns of modules that are sharded as units of their own, such as "layers.*", in any order; what two
            of them match is one. Nothing inside a layer whose tokens are spread over a tp_mesh: that is sharded whole.
        options: for `fully_shard` (reshard_after_forward, mp_policy, offload_policy). A number of ranks to reshard to
            is one for dp_mesh; experts take its greatest common divisor with the ranks that efsdp_mesh shards over,
            and where that is 1 they are resharded to all of these.

    The balance losses become those of the global batch. Delayed weight gradients are reduced by `backward_dw()`.
    Micro-batches add up, with or without `set_requires_gradient_sync(False)` in between. A router of another dtype than
    the rest of its unit is a unit of its own, and computes in its own dtype whatever mp_policy says.
    Not under zero-bubble pipeline schedules: FSDP2 (torch 2.13) loses gradients of nested modules whose backward comes
    in two halves.

    Raises:
        ConfigError: no parallel experts, meshes that do not fit together, an option that `fully_shard` has not or
            that is set here, experts with `main_grad`, whose buffers FSDP2 would not reduce, a pattern that matches
            nothing or what can be no unit, a number of ranks to reshard to that does not divide those of dp_mesh,
            or trained parameters of several dtypes in one. Nothing has been changed then.
    """
    if other := sorted(options.keys() - (signature(fully_shard).parameters.keys() - SET_HERE)):
        raise ConfigError(f"{', '.join(other)}: no option of fully_shard, or one that follows from the meshes given")
    if any(isinstance(module, ParallelExperts) and module.main_grad != "off" for module in model.modules()):
        raise ConfigError("FSDP2 keeps and reduces gradients itself: experts with main_grad go with ddp")
    check_meshes(dp_mesh=dp_mesh, efsdp_mesh=efsdp_mesh)
    of_experts = options | _resharding(options.get("reshard_after_forward"), dp_mesh, efsdp_mesh)
    units = find_units(model, blocks, options.get("ignored_params") or ())
    experts = join_data_parallel(model, dp_mesh, efsdp_mesh)
    for module in experts:
        placement = _placement(module, efsdp_mesh)
        sharded = fully_shard(module, mesh=efsdp_mesh, shard_placement_fn=placement, **of_experts)
        scattered = efsdp_mesh.size(efsdp_mesh.ndim - 1) > 1
        if scattered or getattr(options.get("mp_policy"), "reduce_dtype", None) in DIVIDED_ONCE:
            sharded.set_gradient_divide_factor(float(dp_mesh.size()))
            # Without a real reduction FSDP2 divides in its copy, and a sum that is forced would divide once more.
            sharded.set_force_sum_reduction_for_comms(scattered)
        else:
            module.gradient_scale = efsdp_mesh.size() / dp_mesh.size()
        module.reduce_delayed = partial(_reduce_now, sharded)
    for unit in units:
        if isinstance(unit, Router):
            _shard_router(unit, dp_mesh, options)
        else:
            fully_shard(unit, mesh=dp_mesh, **options)
    return fully_shard(model, mesh=dp_mesh, **options)


def _resharding(given: bool | int | None, dp_mesh: DeviceMesh, efsdp_mesh: DeviceMesh) -> dict[str, bool | int]:
    """What experts are resharded to, if it is not what was given."""
    if given is None or isinstance(given, bool):
        return {}
    ranks = dp_mesh.size(dp_mesh.ndim - 1)
    if not isinstance(given, int) or given < 1 or ranks % given:
        raise ConfigError(
            f"reshard_after_forward={given!r}: a bool, or a number of ranks that divides the {ranks} that dp_mesh "
            f"{dp_mesh} shards over"
        )
    kept = gcd(given, efsdp_mesh.size(efsdp_mesh.ndim - 1))
    return {"reshard_after_forward": True if kept == 1 < given else kept}


def _shard_router(router: Router, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """As a unit that computes and answers in its own types."""
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    own = options | {"mp_policy": replace(policy, param_dtype=None, output_dtype=None)}
    fully_shard(router, mesh=mesh, **own)


def _reduce_now(module: FSDPModule) -> None:
    """What FSDP2 does as a module's backward ends, for gradients that came after it."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        group.post_backward()
        group.finalize_backward()  # type: ignore[no-untyped-call]


def _placement(experts: ParallelExperts, mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Whole experts to each rank where they divide, else a share of each expert's model dim, if that divides."""
    ranks = mesh.size(mesh.ndim - 1)
    other = experts.num_experts % ranks != 0
    up, down = (experts.get_parameter(name) for name in experts.parameter_names[:2])
    dims = {up: up.ndim - 1, down: 1}

    def place(param: nn.Parameter) -> Shard | None:
        dim = dims.get(param)
        return Shard(dim) if other and dim is not None and param.shape[dim] % ranks == 0 else None

    return place


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
            _check_summed(layer, name, {module: names[module] for module in units})
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
    """Raise ConfigError for what torch would refuse once others are sharded."""
    if isinstance(module, FSDPModule):
        raise ConfigError(f"{what} is sharded already")
    if of_experts:
        raise ConfigError(f"{what}: experts are sharded over efsdp_mesh, on their own. Leave them out of blocks")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ConfigError(f"{what} is a {type(module).__name__}, which is never called: shard the modules in it")


def _check_summed(layer: ParallelMoE, name: str, units: dict[nn.Module, str]) -> None:
    """Raise ConfigError for a unit inside: it would gather its parameters after the layer has put others, which sum
    gradients, in their place."""
    for inside in layer.modules():
        if inside is not layer and inside in units and any(param.requires_grad for param in inside.parameters()):
            raise ConfigError(
                f"a layer whose tokens are spread over tp_mesh is sharded whole, in one dtype, and {units[inside]!r} "
                "in it is a unit of its own. Name the layer in its place; a router of another dtype: cast it, or build "
                "all in float32 and let mp_policy's param_dtype cast it",
                layer=name,
            )


def _inner_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """What lies in another has fewer modules."""
    return sorted(modules, key=lambda module: sum(1 for _ in module.modules()))


def _held(model: nn.Module, units: Iterable[nn.Module], elsewhere: Collection[nn.Parameter]) -> list[Held]:
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
