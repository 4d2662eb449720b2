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
from trimtab.routing.balance import routers
from trimtab.routing.router import Router

DIVIDED_ONCE = (torch.float32, torch.bfloat16)
"""Types of a reduction in which FSDP2 divides once, whatever the mesh."""


def fully_shard_moe(
    model: nn.Module, dp_mesh: DeviceMesh, efsdp_mesh: DeviceMesh, *, blocks: Sequence[str] = (), **options: Any
) -> FSDPModule:
    """`fully_shard` on the experts, on blocks and on the model, in place. Call after `parallelize`, on every rank.

    Args:
        dp_mesh: one dim, or two for HSDP, of which the last shards; its size is the data-parallel size, CP included:
            with context parallelism a mesh of all DP x CP ranks, or mesh["dp", "cp"], sharded over cp.
        efsdp_mesh: the ranks that hold the same experts, of one dim or two, as well; a slice of the mesh that the
            experts were parallelized on.
        blocks: patterns of modules that are sharded as units of their own, such as "layers.*", in any order; what two
            of them match is one. Experts are units anyway. Nothing inside a layer whose tokens are spread over a
            tp_mesh: that is sharded whole.
        options: for `fully_shard` (reshard_after_forward, mp_policy, offload_policy). A number of ranks to reshard to
            is one for dp_mesh; experts take its greatest common divisor with the ranks that efsdp_mesh shards over,
            and where that is 1 they are resharded to all of these.

    The balance losses become those of the global batch. Delayed weight gradients are reduced by `backward_dw()`.
    Micro-batches add up, with or without `set_requires_gradient_sync(False)` in between. A router of another dtype than
    the rest of its unit is a unit of its own, and computes in its own dtype whatever mp_policy says.
    Not under zero-bubble pipeline schedules: FSDP2 (torch 2.13) loses gradients of nested modules whose backward comes
    in two halves.

    Raises:
        ConfigError: no parallel experts, meshes that do not fit together, experts with `main_grad`, whose buffers FSDP2
            would not reduce, a pattern that matches nothing, or a unit inside a layer that is sharded whole. Nothing
            has been changed then.
    """
    if any(isinstance(module, ParallelExperts) and module.main_grad != "off" for module in model.modules()):
        raise ConfigError("FSDP2 keeps and reduces gradients itself: experts with main_grad go with ddp")
    check_meshes(dp_mesh=dp_mesh, efsdp_mesh=efsdp_mesh)
    of_experts = options | _resharding(options.get("reshard_after_forward"), efsdp_mesh)
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
        own = options
        if isinstance(unit, Router):  # computes and answers in its own types
            policy = options.get("mp_policy", MixedPrecisionPolicy())
            own = options | {"mp_policy": replace(policy, param_dtype=None, output_dtype=None)}
        fully_shard(unit, mesh=dp_mesh, **own)
    return fully_shard(model, mesh=dp_mesh, **options)


def _resharding(given: bool | int | None, efsdp_mesh: DeviceMesh) -> dict[str, bool | int]:
    """The option by which experts are resharded, if it is not the given one."""
    if given is None or isinstance(given, bool):
        return {}
    kept = gcd(given, efsdp_mesh.size(efsdp_mesh.ndim - 1))
    return {"reshard_after_forward": True if kept == 1 < given else kept}


def _reduce_now(module: FSDPModule) -> None:
    """Do what FSDP2 does as a module's backward ends, for gradients that came after it."""
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
        ConfigError: a pattern that matches nothing; a unit inside a layer whose tokens are spread over a tp_mesh.
    """
    names = {module: name for name, module in model.named_modules()}
    experts = {inside for module in names if isinstance(module, ParallelExperts) for inside in module.modules()}
    units: set[nn.Module] = set()
    for pattern in blocks:
        found = [module for module, name in names.items() if name and matches(name, pattern)]
        if not found:
            raise ConfigError(f"blocks pattern {pattern!r} matches no module of {type(model).__name__}")
        units.update(module for module in found if module not in experts)
    elsewhere = {*ignored, *(param for module in experts for param in module.parameters())}
    units |= _routers_apart(model, units, elsewhere)
    for layer, name in names.items():
        if isinstance(layer, ParallelMoE) and layer.tp_group is not None:
            # A unit inside would gather its parameters after the layer has put others, which sum gradients, there.
            for inside in (units & set(layer.modules())) - {layer}:
                raise ConfigError(
                    "a layer whose tokens are spread over tp_mesh is sharded whole, in one dtype, and "
                    f"{names[inside]!r} in it is a unit of its own. Name the layer in its place; a router of another "
                    "dtype: cast it, or build all in float32 and let mp_policy's param_dtype cast it",
                    layer=name,
                )
    return _inner_first(module for module in names if module in units)


def _inner_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Sort by number of modules: what lies in another has fewer."""
    return sorted(modules, key=lambda module: sum(1 for _ in module.modules()))


def _routers_apart(
    model: nn.Module, units: Collection[nn.Module], elsewhere: Collection[nn.Parameter]
) -> set[nn.Module]:
    """The routers that are no units yet, and have another dtype than the rest of theirs."""
    routers_of = {p: router for router in routers(model).values() if router not in units for p in router.parameters()}
    seen = set(elsewhere)
    apart: set[nn.Module] = set()
    for unit in (*_inner_first(units), model):
        held = [param for param in unit.parameters() if param.requires_grad and param not in seen]
        seen.update(held)
        rest = {param.dtype for param in held if param not in routers_of}
        apart.update(routers_of[param] for param in held if param in routers_of and rest - {param.dtype})
    return apart
