"""A MoE layer whose tokens or experts are spread over ranks, and how it learns of the data-parallel ranks.

Legend: B batch, L positions, l positions of this rank, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trimtab.autograd import refuse_transforms
from trimtab.dispatch.facts import Facts, LineTokens
from trimtab.dispatch.sequence_shard import shard, unshard
from trimtab.errors import ConfigError
from trimtab.moe import MoE, MoEOutput
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.meshes import SumGradients, TokenMeshes, check_meshes
from trimtab.routing.balance import routers
from trimtab.routing.losses import LossGroups

Place = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


class ParallelMoE(MoE):
    """A `MoE` under `ExpertParallel`: the same module, of this class.

    `token_meshes`: who has which tokens. `shares`: the ranks of tp are given the same tokens, and the same gradient of
    the output; each takes its share of the positions. `own_groups`: what this class last set as `router.groups`.
    `lines`: the first rank of this one's line of tp and of cp, -1 where there are no others.
    """

    token_meshes = TokenMeshes()
    shares = False
    own_groups = LossGroups()
    lines = (-1, -1)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same router, shared experts and projections, and route different tokens of one batch:
        gradients of those parameters are summed over it. None where there are no others."""
        tp = self.token_meshes.tp
        return None if tp is None or tp.size() == 1 else tp.get_group()

    def spread(self, meshes: TokenMeshes) -> None:
        """Take the tokens, and so the balance losses, as `meshes` have them; a `router.groups` set by hand stays."""
        before, self.own_groups, self.token_meshes = self.own_groups, meshes.loss_groups(), meshes
        first = [-1 if mesh is None or mesh.size() == 1 else int(mesh.mesh.min()) for mesh in (meshes.tp, meshes.cp)]
        self.lines = first[0], first[1]
        for router in routers(self.router).values():
            router.layer = router.layer or self.dispatcher.layer
            if router.groups == before:
                router.groups = self.own_groups

    def forward(self, x: Tensor, **given: Any) -> MoEOutput:
        """As `MoE.forward`; every rank of the expert group, and all that share the balance losses, must call."""
        group = self.tp_group
        if group is None:
            return super().forward(x, **given)
        refuse_transforms("MoE", self.dispatcher.layer)
        places = self._places()
        params = [module.get_parameter(name) for module, name in places]
        summed: tuple[Tensor, ...] = SumGradients.apply(group, *params) if params else ()  # type: ignore[no-untyped-call]
        with standing_in(places, summed):
            return super().forward(x, **given)

    def _facts(self, x: Tensor, num_sequences: int) -> Facts:
        tp, cp = self.lines
        weights = self.dispatcher.weights_fact(self.experts)
        if max(tp, cp) < 0:
            return Facts(weights)
        by_sequence = any(router.config.sequence_aux_loss for router in routers(self.router).values())
        sequences, positions = x.shape[:-2].numel(), x.shape[-2] if self.shares else -1
        packed = num_sequences if by_sequence else 0
        return Facts(
            weights,
            LineTokens(tp, sequences, positions, packed) if tp >= 0 and (self.shares or by_sequence) else None,
            LineTokens(cp, sequences, packed=packed) if cp >= 0 and by_sequence else None,
        )

    def _share(self, t: Tensor) -> Tensor:
        """[*lead, L, any] -> [*lead, l, any]. No communication; one all-gather in the backward."""
        return shard(t, self.tp_group) if self.shares and self.tp_group is not None else t

    def _whole(self, y: Tensor, like: Tensor) -> Tensor:
        """[*lead, l, D] -> [*lead, L, D], the same on every rank. One all-gather; none in the backward."""
        return unshard(y, like.shape[-2], self.tp_group) if self.shares and self.tp_group is not None else y

    def _places(self) -> list[Place]:
        """Places of the trained parameters other than the experts', in a fixed order."""
        return [
            (module, name)
            for child_name, child in self.named_children() if child_name != "experts"
            for module in child.modules()
            for name, param in module.named_parameters(recurse=False) if param.requires_grad
        ]  # fmt: skip


@contextmanager
def standing_in(places: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within, `module.name` is the tensor; after, whatever was raised, the parameter again (FSDP2's unsharded one)."""
    slots = [(module._parameters, name) for module, name in places]
    kept = [of[name] for of, name in slots]
    try:
        for (of, name), tensor in zip(slots, tensors, strict=True):
            of[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (of, name), parameter in zip(slots, kept, strict=True):
            of[name] = parameter


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
    joined = [(layer, replace(layer.token_meshes, data=dp_mesh)) for layer in layers]
    for layer, meshes in joined:
        assert isinstance(layer.experts, ParallelExperts)
        meshes.check(layer.experts.place.mesh.size() * edp_mesh.size(), layer.dispatcher.layer)
    for layer, meshes in joined:
        layer.spread(meshes)
    return experts
