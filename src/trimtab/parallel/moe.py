"""A MoE layer whose tokens or experts are spread over ranks: the layer itself, with other parameters standing in.

Legend: B batch, L positions, l positions of this rank, D model dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh

from trimtab.backward import not_a_view, once_differentiable
from trimtab.dispatch.handshake import NOTHING, Shared
from trimtab.dispatch.sequence_shard import shard, take_shard, unshard
from trimtab.errors import ConfigError
from trimtab.experts.stand_in import Place, standing_in
from trimtab.layout import SequenceLayout
from trimtab.moe import MoE, MoEOutput
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.meshes import TokenMeshes, check_ascending, check_meshes
from trimtab.routing.losses import LossGroups
from trimtab.routing.router import Router


class ParallelMoE(MoE):
    """What `ExpertParallel` makes of a `MoE`: the same module, of this class.

    `tp_group`: ranks that hold the same router, shared experts and projections, and route different tokens of one
    batch; None where there are no others. Gradients of those parameters are summed over it.
    `token_meshes`: who has which tokens. `own_groups`: what this class last set as `router.groups`. `lines`: the first
    rank of this one's line of tp and of cp, -1 where there are no others.
    """

    token_meshes: TokenMeshes
    own_groups: LossGroups
    lines: tuple[int, int]

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Looked up: a copy of the layer cannot hold a group of its own."""
        tp = self.token_meshes.tp
        return None if tp is None or tp.size() == 1 else tp.get_group()

    def spread(self, meshes: TokenMeshes, layer: str) -> None:
        """Take the tokens as `meshes` has them. layer: this one's name, which routers that have none take."""
        self.token_meshes, self.own_groups = meshes, LossGroups()
        first = [-1 if mesh is None or mesh.size() == 1 else int(mesh.mesh.min()) for mesh in (meshes.tp, meshes.cp)]
        self.lines = first[0], first[1]
        for router in self._routers():
            router.layer = router.layer or layer
            if router.groups == LossGroups():  # not set by hand
                router.groups = self.own_groups
        self.share_losses(meshes)

    def share_losses(self, meshes: TokenMeshes) -> None:
        """The balance losses are those over all ranks of `meshes`, unless `router.groups` was set by hand."""
        before, self.own_groups = self.own_groups, meshes.loss_groups()
        for router in self._routers():
            if router.groups is before:
                router.groups = self.own_groups

    def _routers(self) -> list[Router]:
        """The router, or those inside of one's own."""
        return [module for module in self.router.modules() if isinstance(module, Router)]

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None, ids: Tensor | None = None) -> MoEOutput:
        """As `MoE.forward`; every rank of the expert group, and all that share the balance losses, must call."""
        group = self.tp_group
        if group is None:
            return super().forward(x, token_mask=token_mask, ids=ids)
        self._refuse_transforms()
        places = self._replicated()
        params = [module.get_parameter(name) for module, name in places]
        summed = sum_gradients(params, group) if params else ()
        with standing_in(places, summed):
            return super().forward(x, token_mask=token_mask, ids=ids)

    def _shared(self, x: Tensor) -> Shared:
        (tp, cp), whole = self.lines, isinstance(self.tokens, ReplicatedTokens)
        if max(tp, cp) < 0:
            return NOTHING
        by_sequence = any(router.config.sequence_aux_loss for router in self._routers())
        sequences = x.shape[:-2].numel()
        return Shared(
            tp=tp if whole or by_sequence else -1, cp=cp if by_sequence else -1, sequences=sequences,
            positions=x.shape[-2] if whole else -1,
        )  # fmt: skip

    def _replicated(self) -> list[Place]:
        """Where the trained parameters other than the experts' are, in a fixed order."""
        return [
            (module, name)
            for child_name, child in self.named_children()
            if child_name != "experts"
            for module in child.modules()
            for name, param in module.named_parameters(recurse=False)
            if param.requires_grad
        ]


class ReplicatedTokens:
    """`trimtab.moe.Tokens` over `group`, whose ranks hold the same tokens and the same gradient of the output."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def take(self, t: Tensor) -> Tensor:
        """[*lead, L, any] -> [*lead, l, any]. No communication; one all-gather in the backward."""
        layout = self._layout(t)
        rows = t.reshape(layout.batch * layout.length, t.shape[-1])
        mine = shard(rows, layout, self.group) if t.is_floating_point() else take_shard(rows, layout, self.rank)
        return mine.view(*t.shape[:-2], layout.shard_length(self.rank), t.shape[-1])

    def join(self, y: Tensor, like: Tensor) -> Tensor:
        """[*lead, l, D] -> [*lead, L, D], the same on every rank. One all-gather; none in the backward."""
        layout = self._layout(like)
        rows = y.reshape(layout.tokens(self.rank), y.shape[-1])
        return not_a_view(unshard(rows, layout, self.group), like.shape)

    def _layout(self, t: Tensor) -> SequenceLayout:
        return SequenceLayout.even(math.prod(t.shape[:-2]), t.shape[-2], self.ranks)


class _SumGradients(Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = torch.float32
        for grad in grads:
            dtype = torch.promote_types(dtype, grad.dtype)
        flat = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        return None, *(part.view(grad.shape).to(grad.dtype) for part, grad in zip(parts, grads, strict=True))


def sum_gradients(params: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The same tensors; their gradients are summed over `group` in one all-reduce, in float32 at least.

    Every rank of the group must call, and run the backward, with the same parameters.
    """
    out: tuple[Tensor, ...] = _SumGradients.apply(group, *params)  # type: ignore[no-untyped-call]
    return out


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
