"""FSDP2 for models with MoE layers: experts on their own mesh, every gradient that of the mean loss.

    dense parameters    reduced over dp, divided by dp                        FSDP2's default
    experts             reduced over efsdp, divided by dp, not by efsdp       the exchange has summed the rest already

dp is the number of ranks (or tensor-parallel groups) that have tokens of their own: DP x CP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from trimtab.errors import ConfigError
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.plan import matches


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
        dp_mesh: one dim, or (replicate, shard) for HSDP; its size is the data-parallel size, CP included.
        efsdp_mesh: the ranks that hold the same experts, one dim or (replicate, shard); a slice of the mesh that the
            experts were parallelised on.
        blocks: patterns of modules that are sharded as units of their own, such as "layers.*".
        options: for `fully_shard` (reshard_after_forward, mp_policy, offload_policy).

    Accumulating over micro-batches: add up, with or without `set_requires_gradient_sync(False)` in between.
    With efsdp of size 1 use float32 or bfloat16 gradients: torch 2.13 divides float16 ones twice there.

    Raises:
        ConfigError: no parallel experts, or a pattern that matches nothing.
    """
    experts = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    if not experts:
        raise ConfigError("no experts under ExpertParallel in this model: call parallelize first, or fully_shard alone")
    for module in experts:
        sharded = fully_shard(module, mesh=efsdp_mesh, shard_placement_fn=_placement(module, efsdp_mesh), **options)
        sharded.set_gradient_divide_factor(float(dp_mesh.size()))
        # Without a real reduction FSDP2 divides in its copy, and a sum that is forced would divide once more.
        if efsdp_mesh.size(efsdp_mesh.ndim - 1) > 1:
            sharded.set_force_sum_reduction_for_comms(True)
    for pattern in blocks:
        found = [module for name, module in model.named_modules() if name and matches(name, pattern)]
        if not found:
            raise ConfigError(f"blocks pattern {pattern!r} matches no module of {type(model).__name__}")
        for block in found:
            fully_shard(block, mesh=dp_mesh, **options)
    return fully_shard(model, mesh=dp_mesh, **options)


def _placement(experts: ParallelExperts, mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Whole experts to each rank where they divide. Else, and under expert tensor parallelism, a share of each
    expert's model dim, if that divides: torch's DTensor can't put two interleaved shardings together."""
    ranks = mesh.size(mesh.ndim - 1)
    other = experts.place.etp_group is not None or experts.num_experts % ranks != 0
    dims = {experts._parameters["up"]: 2, experts._parameters["down"]: 1}

    def place(param: nn.Parameter) -> Shard | None:
        dim = dims.get(param)
        return Shard(dim) if other and dim is not None and param.shape[dim] % ranks == 0 else None

    return place
