"""A MoE layer whose tokens or experts are spread over ranks: the layer itself, with other parameters standing in."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from trimtab.dispatch.handshake import NOTHING, Shared
from trimtab.experts.stand_in import Place, standing_in
from trimtab.moe import MoE, MoEOutput
from trimtab.parallel.partial import sum_gradients
from trimtab.parallel.token_meshes import TokenMeshes
from trimtab.parallel.tokens import ReplicatedTokens
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
        params = [module._parameters[name] for module, name in places]
        summed = sum_gradients([p for p in params if p is not None], group) if params else ()
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
            for name, param in module._parameters.items()
            if param is not None and param.requires_grad
        ]
