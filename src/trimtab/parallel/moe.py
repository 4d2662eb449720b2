"""A MoE layer whose tokens or experts are spread over ranks: the layer itself, with other parameters standing in."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from trimtab.layer import MoE, MoEOutput
from trimtab.parallel.partial import sum_gradients
from trimtab.parallel.stand_in import Place, standing_in


class ParallelMoE(MoE):
    """What `ExpertParallel` makes of a `MoE`: the same module, of this class.

    `tp_group`: ranks that hold the same router, shared experts and projections, and route different tokens of one
    batch; None where there are no others. Gradients of those parameters are summed over it.
    """

    tp_group: dist.ProcessGroup | None

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None, ids: Tensor | None = None) -> MoEOutput:
        """As `MoE.forward`; every rank of the expert group and of the tensor-parallel group must call."""
        if self.tp_group is None:
            return super().forward(x, token_mask=token_mask, ids=ids)
        places = self._replicated()
        params = [module._parameters[name] for module, name in places]
        summed = sum_gradients([p for p in params if p is not None], self.tp_group) if params else ()
        with standing_in(places, summed):
            return super().forward(x, token_mask=token_mask, ids=ids)

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
