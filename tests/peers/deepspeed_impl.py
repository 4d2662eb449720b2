"""DeepSpeed's AutoEP: `deepspeed.initialize` finds transformers' MoE blocks and puts its own layers in their place.

Qwen3MoeSparseMoeBlock under the names that AutoEP looks for; `route_norm` off as in the model's configuration; experts
in a loop, or "grouped_mm". Gradients are those that `engine.backward` leaves, averaged by the engine.
Replayed ids go in through a forward hook on its router.

Legend: N tokens, K experts per token, E experts, e experts of this rank.
"""
# mypy: ignore-errors

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm.torch import build_shm_op
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor, nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from peers.asked import reason, residual
from trimtab.verify.implementation import Outcome, Place, Share, Subject
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import LayerWeights, Sizes

build_shm_op()  # by the first to come, which takes half a minute, and not by a rank that has a deadline


class Impl:
    """AutoEP with ZeRO stage 0, experts in its own loop."""

    name = "deepspeed"
    refusal: type[Exception] = Exception
    grouped_mm = False
    stage = 0

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        t = topology
        lacking = {
            "its tensor parallelism splits a whole model's attention, which is not wired here": t.tp > 1,
            "its data parallelism is its own engine's (ZeRO)": t.data != "none",
            "it has no loss per sequence over context-parallel ranks": t.cp > 1,
        }
        return reason(lacking, t, pattern, grouped_mm=self.grouped_mm)

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        return Layers(place, sizes, weights, self)


class Grouped(Impl):
    """Experts by torch._grouped_mm, its default."""

    name = "deepspeed-grouped-mm"
    grouped_mm = True


class Zero1(Impl):
    """ZeRO stage 1."""

    name = "deepspeed-zero1"
    stage = 1


class Zero2(Impl):
    """ZeRO stage 2."""

    name = "deepspeed-zero2"
    stage = 2


class Qwen3MoeStack(nn.Module):
    """Blocks with a residual in between, by the names of a Qwen3-MoE."""

    def __init__(self, sizes: Sizes, weights: Sequence[LayerWeights]) -> None:
        super().__init__()
        self.config = Qwen3MoeConfig(
            hidden_size=sizes.dim,
            moe_intermediate_size=sizes.hidden,
            num_experts=sizes.num_experts,
            num_experts_per_tok=sizes.top_k,
            num_hidden_layers=sizes.layers,
            norm_topk_prob=False,
            hidden_act="silu",
        )
        self.config._experts_implementation = "eager"
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for w in weights:
            block = Qwen3MoeSparseMoeBlock(self.config).to(sizes.dtype)
            with torch.no_grad():
                block.gate.weight.copy_(w.router_ED)
                block.experts.gate_up_proj.copy_(w.up_EID)
                block.experts.down_proj.copy_(w.down_EDF)
            layer = nn.Module()
            layer.mlp = block
            self.model.layers.append(layer)

    def forward(self, h: Tensor) -> Tensor:
        return residual([layer.mlp for layer in self.model.layers], h, lambda mlp, h: mlp(h))


class Layers:
    """One topology's engine."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], impl: Impl) -> None:
        self.place = place
        # As a launcher sets it.
        os.environ |= {"LOCAL_RANK": str(place.rank), "LOCAL_SIZE": str(place.topology.ranks)}
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": impl.stage},
            "zero_allow_untested_optimizer": True,
            "expert_parallel": {
                "enabled": True,
                "autoep_size": place.topology.ep,
                "route_norm": False,
                "use_grouped_mm": impl.grouped_mm,
            },
        }
        stack = Qwen3MoeStack(sizes, weights)
        optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
        self.engine, *_ = deepspeed.initialize(
            model=stack, model_parameters=list(stack.parameters()), config=config | optimizer
        )
        self.layers: list[Any] = [layer.mlp for layer in self.engine.module.model.layers]
        self.replayed_NK: Tensor | None = None
        for mlp in self.layers:
            mlp.router.register_forward_hook(self._replay)

    def _replay(self, router: nn.Module, args: Any, output: Any) -> Any:
        """The router's outputs, of the replayed experts: their scores are live."""
        if self.replayed_NK is None:
            return output
        ids_NK = self.replayed_NK
        scores_NE = router.gate(args[0]).float().softmax(1)
        counts_E = ids_NK.flatten().bincount(minlength=scores_NE.shape[1]).int()
        return scores_NE.gather(1, ids_NK), ids_NK, counts_E

    def step(self, share: Share) -> Outcome:
        self.engine.zero_grad()
        x = share.x_BlD.clone().requires_grad_()
        self.replayed_NK = None if share.ids_BlK is None else share.ids_BlK.flatten(0, 1)
        y = self.engine(x)
        self.engine.backward((y * share.dy_BlD).sum())
        assert x.grad is not None
        return Outcome(y=y, dx=x.grad, grads=self._gradients())

    def _gradients(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for i, mlp in enumerate(self.layers):
            found[f"{i}.router"] = safe_get_full_grad(mlp.router.gate.weight)
            experts = mlp.experts
            gate, up, down = (self._whole(safe_get_full_grad(w)) for w in (experts.w1, experts.w3, experts.w2))
            found[f"{i}.down"] = down
            found[f"{i}.up"] = None if gate is None or up is None else torch.cat((gate, up), 1)
        return found

    def _whole(self, grad_eXX: Tensor | None) -> Tensor | None:
        """All experts, in order."""
        if grad_eXX is None:
            return None
        group = groups._get_expert_parallel_group(f"ep_size_{self.place.topology.ep}")
        parts = [torch.empty_like(grad_eXX) for _ in range(self.place.topology.ep)]
        dist.all_gather(parts, grad_eXX.contiguous(), group=group)
        return torch.cat(parts)
