"""transformers' sparse MoE block under its own expert parallelism, laid out by the functions `from_pretrained` calls.

Qwen3MoeSparseMoeBlock: softmax over all experts, top-k, weights not normalised. The exchange is "all_to_all", the
experts are "grouped_mm" ("eager" in float64), or "eager" throughout. Replayed ids go in through a forward hook on the
gate; its own code runs as it is.

Legend: N tokens, K experts per token, E experts.
"""
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from peers import subject
from trimtab.verify.implementation import Place, gradients_of
from trimtab.verify.trimtab_impl import updated
from trimtab.verify.truth import LayerWeights, Sizes

SHORT = {"gate.weight": "router", "experts.gate_up_proj": "up", "experts.down_proj": "down"}


def qwen3_block(sizes: Sizes, w: LayerWeights, experts: str) -> Any:
    """A block with these weights."""
    config = Qwen3MoeConfig(
        hidden_size=sizes.dim, moe_intermediate_size=sizes.hidden, num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k, num_hidden_layers=sizes.layers, norm_topk_prob=False, hidden_act="silu",
    )  # fmt: skip
    config._experts_implementation = experts
    block = Qwen3MoeSparseMoeBlock(config).to(sizes.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(w.router_ED)
        block.experts.gate_up_proj.copy_(w.up_EID)
        block.experts.down_proj.copy_(w.down_EDF)
    return block


class Stack(nn.Module):
    """Blocks with a residual in between."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__()
        self.layers, self.config = nn.ModuleList(blocks), blocks[0].experts.config

    def forward(self, h: Tensor) -> Tensor:
        return subject.residual(self.layers, h, lambda block, h: block(h))


class Layers(subject.Layers):
    """One topology's stack."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], impl: Impl) -> None:
        t = place.topology
        kind = "eager" if sizes.dtype == torch.float64 else impl.experts  # torch's grouped_mm takes no float64
        self.stack = Stack([qwen3_block(sizes, w, kind) for w in weights]).to(place.device)
        super().__init__(place, self.stack)
        for block in self.stack.layers:
            block.gate.register_forward_hook(self._replay)
        ep_plan: dict[str, str] = {}
        for i in range(sizes.layers if t.ep > 1 else 0):
            experts = f"layers.{i}.experts"
            ep_plan |= {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}
            ep_plan[experts] = "ep_dispatch_experts"
        apply_expert_parallelism(self.stack, place.experts["ep"], place.dense["tp"], ep_plan, "all_to_all")
        if t.data == "fsdp" and t.dp > 1:  # as in `from_pretrained`
            self.stack.config.distributed_config = DistributedConfig(ep_size=t.ep, tp_size=t.tp, fsdp_size=t.dp)
            fsdp_plan = {f"layers.{i}": "free_full_weight" for i in range(sizes.layers)}
            meshes = {"fsdp": place.dense["dp"], "efsdp": place.experts["edp"]}
            named = SimpleNamespace(get_mesh=meshes.__getitem__)
            apply_fully_sharded_data_parallelism(self.stack, named, fsdp_plan, ep_plan)
        elif t.data == "ddp":
            self.model = DistributedDataParallel(self.stack, process_group=place.dense["dp"].get_group())

    def _replay(self, gate: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """The gate's outputs, of the replayed experts: their scores are live."""
        logits_NE, scores_NK, ids_NK = output
        if self.replayed_NK is not None:
            ids_NK = self.replayed_NK
            scores_NK = logits_NE.softmax(1, dtype=torch.float).gather(1, ids_NK).to(logits_NE.dtype)
        return logits_NE, scores_NK, ids_NK

    def gradients(self) -> dict[str, Tensor | None]:
        return gradients_of(self.stack.named_parameters(), self.place, SHORT)

    def updated(self) -> dict[str, Tensor]:
        return updated(self.stack, list(self.stack.named_parameters()), self.place.topology.optimizer, SHORT)


class Impl(subject.Impl):
    """What `DistributedConfig(ep_size=..., ep_implementation="all_to_all")` lays out, without the model around it."""

    name = "transformers"
    experts = "grouped_mm"
    grouped_mm = stepped = True
    layers = Layers

    def lacking(self, t, pattern) -> dict[str, bool]:
        return {
            "its expert parallelism has no sequence-sharded tokens: each rank of a tp group holds them all": (
                t.tokens == "sharded"
            ),
            "it has no loss per sequence, and so nothing over context-parallel ranks": t.cp > 1,
            "with tp, its ep_size must be a multiple of tp_size": t.ep % t.tp > 0,
            "its expert parallelism goes with FSDP2, not with DDP": t.data == "ddp" and t.ep > 1,
            "its HSDP wants a (dp_replicate, efsdp) mesh of experts, which the ledger's meshes do not hold": (
                t.data == "hsdp"
            ),
        }


class Eager(Impl):
    """The same, with a loop over experts in Python."""

    name = "transformers-eager"
    experts = "eager"
    grouped_mm = False
