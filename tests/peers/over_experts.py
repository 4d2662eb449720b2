"""A peer that is one function over an expert-parallel group, behind a router of the ledger's: softmax, then top-k.

Legend: N tokens, K experts per token, E experts, e experts of this rank, D model dim, F hidden dim, I = 2F.
"""
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peers.asked import residual
from trimtab.layout import shard_cuts
from trimtab.verify.implementation import Outcome, Place, Share, averaged
from trimtab.verify.truth import LayerWeights, Sizes


class Layer(nn.Module):
    """Router and this rank's experts; `forward` calls the peer."""

    def __init__(self, place: Place, sizes: Sizes, w: LayerWeights) -> None:
        super().__init__()
        self.sizes, self.group = sizes, place.experts["ep"].get_group()
        cuts, j = shard_cuts(sizes.num_experts, place.topology.ep), self.group.rank()
        mine = slice(cuts[j], cuts[j + 1])
        for name, value in {"router": w.router_ED, **self.params(w.up_EID[mine], w.down_EDF[mine])}.items():
            self.register_parameter(name, nn.Parameter(value.to(place.device, sizes.dtype).contiguous()))
        self.replayed_NK: Tensor | None = None

    def params(self, up_eID: Tensor, down_eDF: Tensor) -> dict[str, Tensor]:
        """The peer's, `gate_up` and `down` among them."""
        return {"gate_up": up_eID, "down": down_eDF}

    def routed(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [N, E] and ids [N, K]."""
        scores_NE = (h.flatten(0, 1) @ self.router.T).softmax(1)
        ids_NK = scores_NE.topk(self.sizes.top_k, 1).indices if self.replayed_NK is None else self.replayed_NK
        return scores_NE, ids_NK

    def as_the_truth(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the peer's parameters, of all experts, as those of the truth's."""
        return up, down


class Layers:
    """One topology's stack."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], layer: type[Layer]) -> None:
        self.place = place
        self.layers = nn.ModuleList(layer(place, sizes, w) for w in weights)

    def step(self, share: Share) -> Outcome:
        self.layers.zero_grad()
        x = share.x_BlD.clone().requires_grad_()
        for layer in self.layers:
            layer.replayed_NK = None if share.ids_BlK is None else share.ids_BlK.flatten(0, 1)
        y = residual(self.layers, x, lambda layer, h: layer(h))
        y.backward(share.dy_BlD)
        found = {}
        for i, layer in enumerate(self.layers):
            found[f"{i}.router"] = averaged(layer.router.grad, self.place, False)
            parts = [self._whole(grad) for grad in (layer.gate_up.grad, layer.down.grad)]
            found[f"{i}.up"], found[f"{i}.down"] = layer.as_the_truth(*parts)
        return Outcome(y=y, dx=x.grad, grads=found)

    def _whole(self, grad_eXX: Tensor) -> Tensor:
        """All experts, in order."""
        averaged(grad_eXX, self.place, True)
        parts = [torch.empty_like(grad_eXX) for _ in range(self.place.topology.ep)]
        dist.all_gather(parts, grad_eXX, group=self.place.experts["ep"].get_group())
        return torch.cat(parts)
