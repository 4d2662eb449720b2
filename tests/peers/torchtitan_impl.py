"""torchtitan's MoE, built from its config, with its all-to-all token dispatcher wired to the ledger's meshes, or its
local one.

Softmax scores over all experts, top-k, not normalised, no load-balancing bias. Replayed ids go in through a forward
hook on the router; its code is as it is. torchtitan's experts compute in bfloat16 whatever the case's dtype is.
Written for torchtitan's sources of August 2026, whose MoE takes [T, D], and its release 0.3.0, which takes [B, L, D].

Legend: T = B * l tokens, K experts per token, E experts, e experts of this rank.
"""
# torchtitan is seldom at hand where types are checked.
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.distributed.spmd_types import set_current_spmd_mesh, set_spmd_meshes
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from peers.asked import reason, residual
from trimtab.layout import shard_cuts
from trimtab.verify.implementation import Outcome, Place, Share, Subject, averaged, over_all_ranks
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import LayerWeights, Sizes

FLAT = "x_TD" in inspect.signature(MoE.forward).parameters
"""Whether its MoE takes [T, D] rather than [B, l, D]."""


class Impl:
    """Expert parallelism over tokens of each rank's own. What its trainer lays out around that is not wired here."""

    name = "torchtitan"
    refusal: type[Exception] = Exception
    dispatcher: Any = AllToAllTokenDispatcher

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        t = topology
        lacking = {
            "its local dispatcher is for ranks that own all experts": t.ep > 1
            and self.dispatcher is LocalTokenDispatcher,
            "its tensor and sequence parallelism come with its trainer's meshes, which are not wired": t.tp > 1,
            "its FSDP and HSDP come with its trainer's meshes, which are not wired": t.data in ("fsdp", "hsdp"),
            "its data parallelism is FSDP2 and HSDP, it has no DDP": t.data == "ddp",
            "its losses per sequence come with its trainer, which is not wired": t.cp > 1,
            "its ids come from its own top-k, so no token chooses an expert twice": (
                pattern.name in ("duplicates", "one_rank", "lone_rank")
            ),
        }
        return reason(lacking, t, pattern)

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        return Layers(place, sizes, weights, self.dispatcher)


class Local(Impl):
    """The dispatcher that its models have without expert parallelism."""

    name = "torchtitan-local"
    dispatcher = LocalTokenDispatcher


def _config(sizes: Sizes, dispatcher: Any) -> Any:
    """One layer's configuration, with all experts."""
    experts, top_k = sizes.num_experts, sizes.top_k
    return MoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        router=TokenChoiceTopKRouter.Config(
            num_experts=experts,
            gate=Linear.Config(in_features=sizes.dim, out_features=experts),
            top_k=top_k,
            score_func="softmax",
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=sizes.dim, hidden_dim=sizes.hidden, num_experts=experts),
            token_dispatcher=dispatcher.Config(num_experts=experts, top_k=top_k),
        ),
    )


class Stack(nn.Module):
    """Layers with a residual in between, each with this rank's experts."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], dispatcher: Any) -> None:
        super().__init__()
        self.moes: list[Any] = [_config(sizes, dispatcher).build() for _ in range(sizes.layers)]
        self.layers = nn.ModuleList(self.moes).to(place.device)
        self.replayed_BlK: Tensor | None = None
        cuts, j = shard_cuts(sizes.num_experts, place.topology.ep), place.experts["ep"].get_local_rank()
        for moe, w in zip(self.moes, weights, strict=True):
            routed = moe.routed_experts
            gate_EFD, up_EFD = w.up_EID.chunk(2, 1)
            for name, value in (("w1_EFD", gate_EFD), ("w3_EFD", up_EFD), ("w2_EDF", w.down_EDF)):
                mine = value[cuts[j] : cuts[j + 1]].to(place.device, sizes.dtype).contiguous()
                setattr(routed.inner_experts, name, nn.Parameter(mine))
            moe.router.gate.weight = nn.Parameter(w.router_ED.to(place.device, sizes.dtype))
            moe.router.register_forward_hook(self._replay)
            moe.tokens_per_expert_E.zero_()
            if place.topology.ep > 1:
                routed.token_dispatcher.wire_meshes(ep_mesh=place.experts["ep"])

    def _replay(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """The router's outputs, of the replayed experts: their scores are live."""
        scores_TK, ids_TK, scores_TE = output
        if self.replayed_BlK is not None:
            ids_TK = self.replayed_BlK.view_as(ids_TK)
            scores_TK = scores_TE.gather(-1, ids_TK)
        return scores_TK, ids_TK, scores_TE

    def forward(self, h: Tensor) -> Tensor:
        return residual(self.layers, h, lambda moe, h: moe(h.flatten(0, 1)).view_as(h) if FLAT else moe(h))


class Layers:
    """One topology's stack."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], dispatcher: Any) -> None:
        self.place = place
        # Gloo refuses the all-to-all of its default backend wherever splits differ, and takes that of the other one.
        self.typed = place.device.type == "cuda"
        set_spmd_backend("spmd_types" if self.typed else "partial_dtensor")
        self.stack = Stack(place, sizes, weights, dispatcher)

    def step(self, share: Share) -> Outcome:
        self.stack.zero_grad()
        for moe in self.stack.moes:
            moe.tokens_per_expert_E.zero_()
        x = share.x_BlD.clone().requires_grad_()
        self.stack.replayed_BlK = share.ids_BlK
        if self.typed:
            sparse = self.place.experts if self.place.topology.ep > 1 else None
            set_spmd_meshes(dense_mesh=self.place.dense, sparse_mesh=sparse)
        # As its trainer does around a step.
        with set_current_spmd_mesh(self.place.dense) if self.typed else contextlib.nullcontext():
            y = self.stack(x)
            y.backward(share.dy_BlD)
        assert x.grad is not None
        loads = [over_all_ranks(moe.tokens_per_expert_E.clone(), self.place) for moe in self.stack.moes]
        return Outcome(y=y, dx=x.grad, grads=self._gradients(), loads=loads)

    def _gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients, averaged here."""
        found: dict[str, Tensor | None] = {}
        for i, moe in enumerate(self.stack.moes):
            experts = moe.routed_experts.inner_experts
            parts = [self._whole(experts.get_parameter(name).grad) for name in ("w1_EFD", "w3_EFD", "w2_EDF")]
            gate, up, found[f"{i}.down"] = parts
            found[f"{i}.up"] = None if gate is None or up is None else torch.cat((gate, up), 1)
            router = moe.router.gate.weight.grad
            found[f"{i}.router"] = None if router is None else averaged(router, self.place, False)
        return found

    def _whole(self, grad_eXX: Tensor | None) -> Tensor | None:
        """The mean gradient of all experts."""
        if grad_eXX is None:
            return None
        averaged(grad_eXX, self.place, True)
        mesh = self.place.experts["ep"]
        return (
            DTensor.from_local(grad_eXX, mesh, [Shard(0)], run_check=False).redistribute(mesh, [Replicate()]).to_local()
        )
