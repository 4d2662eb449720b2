"""Bugs of reducing gradients and losses over data-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from mutants.patching import Mutant, Patches
from trimtab.parallel import ddp, fsdp, meshes
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.meshes import TokenMeshes, groups_of
from trimtab.routing.losses import LossGroups
from trimtab.verify import trimtab_impl


def _default_divisor(p: Patches) -> None:
    def wrap(model: nn.Module, dp_mesh: DeviceMesh, efsdp_mesh: DeviceMesh, **options: Any) -> FSDPModule:
        made: FSDPModule = original(model, dp_mesh, efsdp_mesh, **options)
        for module in model.modules():
            if isinstance(module, ParallelExperts):
                module.gradient_scale = 1.0
                sharded: Any = module
                sharded.set_gradient_divide_factor(float(efsdp_mesh.size()))
        return made

    original = fsdp.fully_shard_moe
    p.put(trimtab_impl, "fully_shard_moe", wrap)


def _unscaled(p: Patches) -> None:
    def wrap(model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh, **options: Any) -> DistributedDataParallel:
        wrapped: DistributedDataParallel = original(model, dp_mesh, edp_mesh, **options)
        for module in wrapped.modules():
            if isinstance(module, ParallelExperts):
                module.gradient_scale = 1.0
        return wrapped

    original = ddp.ddp
    p.put(trimtab_impl, "ddp", wrap)


def _dense_by_ep(p: Patches) -> None:
    def wrap(model: nn.Module, dp_mesh: DeviceMesh, efsdp_mesh: DeviceMesh, **options: Any) -> FSDPModule:
        ep = [dist.get_world_size(m.place.ep_group) for m in model.modules() if isinstance(m, ParallelExperts)]
        made: FSDPModule = original(model, dp_mesh, efsdp_mesh, **options)
        made.set_gradient_divide_factor(float(dp_mesh.size() * ep[0]))
        if dp_mesh.size(dp_mesh.ndim - 1) > 1:  # Gloo has no other reduction for such a divisor
            made.set_force_sum_reduction_for_comms(True)
        return made

    original = fsdp.fully_shard_moe
    p.put(trimtab_impl, "fully_shard_moe", wrap)


def _not_reduced(p: Patches) -> None:
    p.put(ddp._ExpertReducer, "_reached", lambda self, param: None)


def _averaged_over_tp(p: Patches) -> None:
    @p.around(meshes.SumGradients, "backward")
    def backward(original: Any, ctx: Any, *grads: Any) -> Any:
        summed: Any = original(ctx, *grads)[1:]
        return None, *(grad / dist.get_world_size(ctx.group) for grad in summed)


def _per_rank(p: Patches) -> None:
    @p.around(TokenMeshes, "loss_groups")
    def alone(groups: Any, self: TokenMeshes) -> LossGroups:
        return replace(groups(self), sequence=groups_of(self.tp))


MUTANTS = (
    Mutant(name="sequence_loss_per_cp_rank", patch=_per_rank, look="2r-ep2-cp2/random/*",
           says="the loss per sequence counts what one context-parallel rank holds, not the sequence"),
    Mutant(name="fsdp_experts_x_ep", patch=_default_divisor, look="2r-ep2-fsdp/*",
           says="FSDP2 divides expert gradients by its own mesh: EP times too large (pytorch#160285)"),
    Mutant(name="ddp_experts_x_ep", patch=_unscaled, look="2r-ep2-ddp/*",
           says="expert gradients under DDP are averaged over their copies only: EP times too large (pytorch#160285)"),
    Mutant(name="fsdp_dense_by_ep", patch=_dense_by_ep, look="2r-ep2-fsdp/*",
           says="dense gradients are divided by EP as well as by the data-parallel size"),
    Mutant(name="ddp_experts_not_reduced", patch=_not_reduced, look="2r-ddp-local/*",
           says="experts that DDP was told to ignore are reduced by nobody, and their copies drift"),
    Mutant(name="router_averaged_over_tp", patch=_averaged_over_tp, look="2r-ep2-tp2-sharded/*",
           says="the router's gradient is the mean of tensor-parallel ranks' instead of the sum (torchtitan#4054)"),
)  # fmt: skip
