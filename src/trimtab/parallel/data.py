"""What all ways of data parallelism need to know of a model's layers before gradients are reduced over ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trimtab.errors import ConfigError
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.moe import ParallelMoE
from trimtab.parallel.token_meshes import check_ascending, check_meshes


def join_data_parallel(model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh) -> list[ParallelExperts]:
    """Tell each layer of the ranks that gradients are averaged over; returns the experts of all layers.

    The balance losses become those of the global batch, except where `router.groups` was set by hand. Called by
    `fully_shard_moe` and `ddp`; call it where gradients are reduced in some other way. No communication.

    Args:
        dp_mesh: the ranks that have tokens of their own, CP included, of one dim or two.
        edp_mesh: the ranks that hold the same experts, of one dim or two.

    Raises:
        ConfigError: no parallel layer, or meshes that do not fit together. Nothing has been changed then.
    """
    check_meshes(dp_mesh=dp_mesh, edp_mesh=edp_mesh)
    layers = [module for module in model.modules() if isinstance(module, ParallelMoE)]
    experts = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    if not experts:
        raise ConfigError(f"no experts under ExpertParallel in {type(model).__name__}: call parallelize first")
    check_ascending(edp_mesh, "edp_mesh")
    joined = [(layer, replace(layer.token_meshes, data=dp_mesh)) for layer in layers]
    for layer, meshes in joined:
        assert isinstance(layer.experts, ParallelExperts)
        meshes.check(layer.experts.place.mesh.size() * edp_mesh.size(), layer.dispatcher.layer)
    for layer, meshes in joined:
        layer.token_meshes = meshes
        layer.share_losses(meshes)
    return experts
