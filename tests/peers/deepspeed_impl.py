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
from deepspeed.comm.torch import build_shm_op
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor, nn

from peers import subject
from peers.transformers_impl import qwen3_block
from trimtab.verify.implementation import Place
from trimtab.verify.truth import LayerWeights, Sizes

build_shm_op()  # by the first to come, which takes half a minute, and not by a rank that has a deadline


class Layers(subject.Layers):
    """Blocks with a residual in between, by the names of a Qwen3-MoE, in an engine."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], impl: Impl) -> None:
        # As a launcher sets it.
        os.environ |= {"LOCAL_RANK": str(place.rank), "LOCAL_SIZE": str(place.topology.ranks)}
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": impl.stage},
            "zero_allow_untested_optimizer": True,
            "expert_parallel": {
                "enabled": True, "autoep_size": place.topology.ep, "route_norm": False,
                "use_grouped_mm": impl.grouped_mm,
            },
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        }  # fmt: skip
        stack = nn.Module()
        stack.model = nn.Module()
        stack.model.layers = nn.ModuleList()
        for w in weights:
            layer = nn.Module()
            layer.mlp = qwen3_block(sizes, w, "eager")
            stack.config = layer.mlp.experts.config
            stack.model.layers.append(layer)
        stack.forward = lambda h: subject.residual([layer.mlp for layer in stack.model.layers], h, lambda m, h: m(h))
        engine, *_ = deepspeed.initialize(model=stack, model_parameters=list(stack.parameters()), config=config)
        self.group = groups._get_expert_parallel_group(f"ep_size_{place.topology.ep}")
        self.layers: list[Any] = [layer.mlp for layer in engine.module.model.layers]
        super().__init__(place, engine)
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

    def backward(self, y: Tensor, dy: Tensor) -> None:
        self.model.backward((y * dy).sum())

    def gradients(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for i, mlp in enumerate(self.layers):
            found[f"{i}.router"] = safe_get_full_grad(mlp.router.gate.weight)
            weights = (mlp.experts.w1, mlp.experts.w3, mlp.experts.w2)
            gate, up, down = (subject.everyone(safe_get_full_grad(w), self.group) for w in weights)
            found[f"{i}.down"] = down
            found[f"{i}.up"] = None if gate is None or up is None else torch.cat((gate, up), 1)
        return found


class Impl(subject.Impl):
    """AutoEP with ZeRO stage 0, experts in its own loop."""

    name = "deepspeed"
    layers = Layers
    stage = 0

    def lacking(self, t, pattern) -> dict[str, bool]:
        return {
            "its tensor parallelism splits a whole model's attention, which is not wired here": t.tp > 1,
            "its data parallelism is its own engine's (ZeRO)": t.data != "none",
            "it has no loss per sequence over context-parallel ranks": t.cp > 1,
        }


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
