"""LLEP, Least-Loaded Expert Parallelism: `gptoss_llep_forward`, which moves tokens and weights to less loaded ranks.

Its experts are gpt-oss': (up + 1) * gate * sigmoid(alpha * gate), biased, clamped. With alpha 1, no clamp within reach
and a bias of -1 for up they are the truth's SwiGLU, to the rounding of up - 1 + 1: so it is judged in float64.
`min_tokens_per_gemm` is 1, or it would leave the few tokens of a case where they are. The router is the ledger's.

Legend: N tokens, K experts per token, E experts, e experts of this rank, D model dim, F hidden dim.
"""
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from llep.gpt_oss_llep import gptoss_llep_forward
from torch import Tensor, nn

from trimtab.layout import shard_cuts
from trimtab.verify.adapters import Outcome, Place, Share, Subject, averaged, reason, residual
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import LayerWeights, Sizes


class Impl:
    """All weights and tokens may move: `max_tokens_factor` 1.1, its default."""

    name = "llep"
    refusal: type[Exception] = Exception

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        t = topology
        lacking = {
            "it is one function over an expert-parallel group": t.tp > 1 or t.data != "none" or t.cp > 1,
        }
        return reason(lacking, t, pattern, grouped_mm=False)

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        return Layers(place, sizes, weights)


class Layer(nn.Module):
    """A router of the ledger's in front of LLEP's experts."""

    def __init__(self, place: Place, sizes: Sizes, w: LayerWeights) -> None:
        super().__init__()
        cuts, j = shard_cuts(sizes.num_experts, place.topology.ep), place.experts["ep"].get_local_rank()
        mine = slice(cuts[j], cuts[j + 1])
        self.sizes, self.group = sizes, place.experts["ep"].get_group()
        gate_up = w.up_EID[mine].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).mT  # gate and up side by side
        bias = torch.tensor([0.0, -1.0]).repeat(sizes.hidden).expand(len(gate_up), -1)
        params = {"router": w.router_ED, "gate_up": gate_up, "down": w.down_EDF[mine].mT}
        params |= {"gate_up_bias": bias, "down_bias": torch.zeros(len(gate_up), sizes.dim)}
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.to(place.device, sizes.dtype).contiguous()))
        self.replayed_NK: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        scores_NE = (h.flatten(0, 1) @ self.router.T).softmax(1)
        ids_NK = scores_NE.topk(self.sizes.top_k, 1).indices if self.replayed_NK is None else self.replayed_NK
        y = gptoss_llep_forward(
            h, ids_NK, scores_NE, self.gate_up, self.gate_up_bias, self.down, self.down_bias,
            self.sizes.num_experts, len(self.gate_up), self.group, limit=1e30, alpha=1.0, min_tokens_per_gemm=1,
        )  # fmt: skip
        return y.view_as(h)


class Layers:
    """One topology's stack."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> None:
        self.place = place
        self.layers = nn.ModuleList(Layer(place, sizes, w) for w in weights)

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
            up = self._whole(layer.gate_up.grad)
            found[f"{i}.up"] = None if up is None else up.mT.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            down = self._whole(layer.down.grad)
            found[f"{i}.down"] = None if down is None else down.mT
        return Outcome(y=y, dx=x.grad, grads=found)

    def _whole(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        averaged(grad, self.place, True)
        parts = [torch.empty_like(grad) for _ in range(self.place.topology.ep)]
        dist.all_gather(parts, grad, group=self.place.experts["ep"].get_group())
        return torch.cat(parts)
