"""trimtab's own layer, laid out by trimtab's own `parallelize`, as a user would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimtab.errors import InputError
from trimtab.layer import MoE, MoEConfig
from trimtab.parallel.ddp import ddp
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.parallel.plan import parallelize
from trimtab.parallel.style import ExpertParallel
from trimtab.routing.config import RouterConfig
from trimtab.verify.adapters.base import Outcome, Place, Share, Subject
from trimtab.verify.patterns import Pattern
from trimtab.verify.problem import LayerWeights, Sizes
from trimtab.verify.topologies import Topology


class Impl:
    """The implementation that lacks nothing."""

    name = "trimtab"
    refusal: type[Exception] = InputError

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        return None

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        return Layers(place, sizes, weights)


class Stack(nn.Module):
    """MoE layers with a residual in between; gives back (y, loads by layer)."""

    def __init__(self, sizes: Sizes, combine: str, device: torch.device) -> None:
        super().__init__()
        config = MoEConfig(
            dim=sizes.dim,
            hidden=sizes.hidden,
            router=RouterConfig(num_experts=sizes.num_experts, top_k=sizes.top_k, normalize=False),
            combine=combine,  # type: ignore[arg-type]
            dtype=sizes.dtype,
            device=device,
        )
        self.moes: list[MoE] = [config.build(layer=f"layers.{i}") for i in range(sizes.layers)]
        self.layers = nn.ModuleList(self.moes)

    def forward(self, h: Tensor, mask: Tensor | None, ids: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        y, loads = h, []
        for i, moe in enumerate(self.moes):
            h = h + y if i else h
            y, _, load, _ = moe(h, token_mask=mask, ids=ids)
            loads.append(load)
        return y, loads


class Layers:
    """One topology's stack."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> None:
        t, self.place = place.topology, place
        stack = Stack(sizes, t.combine, place.device)
        with torch.no_grad():
            for moe, w in zip(stack.moes, weights, strict=True):
                moe.router.weight.copy_(w.router_ED)
                moe.experts.up.copy_(w.up_EID)
                moe.experts.down.copy_(w.down_EDF)
        style = ExpertParallel(
            transport="allgather" if t.transport == "allgather" else "alltoall",
            tokens=t.tokens,
            combine=t.combine,
            tp_mesh=place.dense["tp"] if t.tp > 1 else None,
            etp="etp" if t.etp > 1 else None,
        )
        parallelize(stack, place.experts["etp", "ep"] if t.etp > 1 else place.experts["ep"], {"layers.*": style})
        self.model: Any = stack
        if t.data == "fsdp":
            self.model = fully_shard_moe(stack, place.dense["dp"], place.experts["edp"])
        elif t.data == "hsdp":
            self.model = fully_shard_moe(stack, place.dense["replicate", "shard"], place.experts["edp"])
        elif t.data == "ddp":
            self.model = ddp(stack, place.dense["dp"], place.experts["edp"])

    def step(self, share: Share) -> Outcome:
        self.model.zero_grad()
        x = share.x_BlD.clone().requires_grad_()
        y, loads = self.model(x, share.mask_Bl, share.ids_BlK)
        y.backward(share.dy_BlD)
        assert x.grad is not None
        return Outcome(y=y, dx=x.grad, grads=self._gradients(), loads=[self._everywhere(load) for load in loads])

    def _gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients; without data parallelism they are averaged here."""
        found: dict[str, Tensor | None] = {}
        for name, param in self.model.named_parameters():
            grad = param.grad
            if grad is not None and self.place.topology.data == "none":
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                group = self.place.experts["edp"] if ".experts." in name else self.place.dense["dp"]
                dist.all_reduce(local, group=group.get_group())
                local /= self.place.topology.dp
            layer, part = name.removeprefix("module.").removeprefix("layers.").split(".", 1)
            short = {"router.weight": "router", "experts.up": "up", "experts.down": "down"}[part]
            found[f"{layer}.{short}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        return found

    def _everywhere(self, loads_E: Tensor) -> Tensor:
        """Loads over all ranks of the topology: each routes tokens of its own."""
        for mesh in (self.place.experts["edp"], self.place.experts["etp"], self.place.experts["ep"]):
            dist.all_reduce(loads_E, group=mesh.get_group())
        return loads_E
