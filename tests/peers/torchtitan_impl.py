"""torchtitan's MoE, built from its config, with its all-to-all token dispatcher wired to the ledger's meshes, or its
local one.

Softmax scores over all experts, top-k, not normalised, no load-balancing bias. Replayed ids go in through a forward
hook on the router; its code is as it is. torchtitan's experts compute in bfloat16 whatever the case's dtype is.
Written for torchtitan's sources of August 2026, whose MoE takes [T, D], and its release 0.3.0, which takes [B, L, D].

Legend: T = B * l tokens, K experts per token, E experts, e experts of this rank.
"""
# mypy: ignore-errors

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.distributed.spmd_types import set_current_spmd_mesh, set_spmd_meshes
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from peers import subject
from trimtab.layout import shard_cuts
from trimtab.verify.implementation import Outcome, Place, Share, averaged, over_all_ranks
from trimtab.verify.truth import LayerWeights, Sizes

FLAT = "x_TD" in inspect.signature(MoE.forward).parameters
"""Whether its MoE takes [T, D] rather than [B, l, D]."""


def _config(sizes: Sizes, dispatcher: Any) -> Any:
    """One layer's configuration, with all experts."""
    experts, top_k = sizes.num_experts, sizes.top_k
    return MoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        router=TokenChoiceTopKRouter.Config(
            num_experts=experts, gate=Linear.Config(in_features=sizes.dim, out_features=experts), top_k=top_k,
            score_func="softmax",
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=sizes.dim, hidden_dim=sizes.hidden, num_experts=experts),
            token_dispatcher=dispatcher.Config(num_experts=experts, top_k=top_k),
        ),
    )  # fmt: skip


class Layers(subject.Layers):
    """One topology's stack, each layer with this rank's experts."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], impl: Impl) -> None:
        # Gloo refuses the all-to-all of its default backend wherever splits differ, and takes that of the other one.
        self.typed = place.device.type == "cuda"
        set_spmd_backend("spmd_types" if self.typed else "partial_dtensor")
        self.moes = nn.ModuleList(_config(sizes, impl.dispatcher).build() for _ in range(sizes.layers)).to(place.device)
        self.moes.forward = lambda h: subject.residual(
            self.moes, h, lambda moe, h: moe(h.flatten(0, 1)).view_as(h) if FLAT else moe(h)
        )
        super().__init__(place, self.moes)
        cuts, j = shard_cuts(sizes.num_experts, place.topology.ep), place.experts["ep"].get_local_rank()
        for moe, w in zip(self.moes, weights, strict=True):
            routed = moe.routed_experts
            gate_EFD, up_EFD = w.up_EID.chunk(2, 1)
            for name, value in (("w1_EFD", gate_EFD), ("w3_EFD", up_EFD), ("w2_EDF", w.down_EDF)):
                mine = value[cuts[j] : cuts[j + 1]].to(place.device, sizes.dtype).contiguous()
                setattr(routed.inner_experts, name, nn.Parameter(mine))
            moe.router.gate.weight = nn.Parameter(w.router_ED.to(place.device, sizes.dtype))
            moe.router.register_forward_hook(self._replay)
            if place.topology.ep > 1:
                routed.token_dispatcher.wire_meshes(ep_mesh=place.experts["ep"])

    def _replay(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """The router's outputs, of the replayed experts: their scores are live."""
        scores_TK, ids_TK, scores_TE = output
        if self.replayed_NK is not None:
            ids_TK = self.replayed_NK.view_as(ids_TK)
            scores_TK = scores_TE.gather(-1, ids_TK)
        return scores_TK, ids_TK, scores_TE

    def step(self, share: Share) -> Outcome:
        for moe in self.moes:
            moe.tokens_per_expert_E.zero_()
        if self.typed:
            sparse = self.place.experts if self.place.topology.ep > 1 else None
            set_spmd_meshes(dense_mesh=self.place.dense, sparse_mesh=sparse)
        # As its trainer does around a step.
        with set_current_spmd_mesh(self.place.dense) if self.typed else contextlib.nullcontext():
            outcome = super().step(share)
        loads = [over_all_ranks(moe.tokens_per_expert_E.clone(), self.place) for moe in self.moes]
        return replace(outcome, loads=loads)

    def gradients(self) -> dict[str, Tensor | None]:
        """Averaged here."""
        found: dict[str, Tensor | None] = {}
        for i, moe in enumerate(self.moes):
            experts = moe.routed_experts.inner_experts
            weights = (experts.get_parameter(name) for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
            gate, up, found[f"{i}.down"] = (self.of_all_experts(weight.grad) for weight in weights)
            found[f"{i}.up"] = None if gate is None or up is None else torch.cat((gate, up), 1)
            router = moe.router.gate.weight.grad
            found[f"{i}.router"] = None if router is None else averaged(router, self.place, False)
        return found


class Impl(subject.Impl):
    """Expert parallelism over tokens of each rank's own. What its trainer lays out around that is not wired here."""

    name = "torchtitan"
    dispatcher: Any = AllToAllTokenDispatcher
    grouped_mm = True
    layers = Layers

    def lacking(self, t, pattern) -> dict[str, bool]:
        local = self.dispatcher is LocalTokenDispatcher
        return {
            "its local dispatcher is for ranks that own all experts": t.ep > 1 and local,
            "its tensor and sequence parallelism come with its trainer's meshes, which are not wired": t.tp > 1,
            "its FSDP and HSDP come with its trainer's meshes, which are not wired": t.data in ("fsdp", "hsdp"),
            "its data parallelism is FSDP2 and HSDP, it has no DDP": t.data == "ddp",
            "its losses per sequence come with its trainer, which is not wired": t.cp > 1,
            "its ids come from its own top-k, so no token chooses an expert twice": pattern.name in subject.TWICE,
        }


class Local(Impl):
    """The dispatcher that its models have without expert parallelism."""

    name = "torchtitan-local"
    dispatcher = LocalTokenDispatcher
