"""Parts that peers share: the reasons why one is not asked for a case, a stack of their layers, and its step.

Legend: N tokens, K experts per token, E experts, e experts of this rank.
"""
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.verify.implementation import Outcome, Place, Share, Subject, averaged
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import LayerWeights, Sizes

TWICE = ("duplicates", "one_rank", "lone_rank")
"""Patterns in which a token chooses an expert twice."""


def first_reason(reasons: Mapping[str, bool]) -> str | None:
    return next((said for said, holds in reasons.items() if holds), None)


class Impl:
    """A peer. layers: makes its stack of (place, sizes, weights, this)."""

    name: str
    refusal: type[Exception] = Exception
    layers: Callable[..., Subject]
    grouped_mm = False
    stepped = False
    """By torch's AdamW and by our Muon: its layers say what parameters are then."""

    def lacking(self, t: Topology, pattern: Pattern) -> dict[str, bool]:
        """Reasons of the peer's own, and which hold."""
        return {}

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        t = topology
        shared = {
            f"it has no transport {t.transport}": t.transport not in ("local", "alltoall"),
            "it has no ordered combine": t.combine == "ordered",
            "its experts have no adapters of their own": t.adapter != "none",
            "it copies no experts for one call": t.replicas != "none",
            "it is not asked to run layers again": t.rerun != "none",
            "it has no loss per document of a pack": t.packed != "none",
            "it is not asked for a step of an optimizer": t.optimizer != "none" and not self.stepped,
            "its experts are not asked to be codes": t.codes != "none",
            "it is not asked where gradients of weights go": (t.sink, t.later) != ("none", "none"),
            "it does not split experts over etp as well as over ep": t.etp > 1,
            "its MoE takes no token mask: padding is routed as any token is": pattern.masked > 0,
            "it has no dropped slots: each slot holds an expert's id": pattern.name in ("dropped", "all_dropped"),
            "its ids come from its own top-k, so none is out of range": pattern.spoil == "id",
            "it leaves open which of equal scores is chosen": pattern.ties,
            "it promises no error for a NaN, which goes through as in PyTorch": pattern.spoil == "nan",
            "its grouped_mm takes rows of multiples of 16 bytes alone": pattern.odd and self.grouped_mm,
        }
        return first_reason(self.lacking(t, pattern) | shared)

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        return self.layers(place, sizes, weights, self)


def residual(layers: Iterable[nn.Module], h: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    """The layers in turn, h = h + layer(h) between them; the last one's own output."""
    y = h
    for i, layer in enumerate(layers):
        h = h + y if i else h
        y = run(layer, h)
    return y


def everyone(grad_eXX: Tensor | None, group: Any, dim: int = 0) -> Tensor | None:
    """The parts of all ranks of a group, in order; of dim 0 all experts."""
    if grad_eXX is None:
        return None
    parts = [torch.empty_like(grad_eXX, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, grad_eXX.contiguous(), group=group)
    return torch.cat(parts, dim)


class Layers:
    """One topology's stack. model: called with [B, l, D]. It looks at `replayed_NK`, replayed ids or None."""

    def __init__(self, place: Place, model: Any) -> None:
        self.place, self.model = place, model
        self.replayed_NK: Tensor | None = None

    def step(self, share: Share) -> Outcome:
        self.model.zero_grad()
        x = share.x_BlD.clone().requires_grad_()
        self.replayed_NK = None if share.ids_BlK is None else share.ids_BlK.flatten(0, 1)
        y = self.model(x)
        self.backward(y, share.dy_BlD)
        return Outcome(y=y, dx=x.grad, grads=self.gradients(), updated=self.updated())

    def backward(self, y: Tensor, dy: Tensor) -> None:
        y.backward(dy)

    def gradients(self) -> dict[str, Tensor | None]:
        """Whole ones by name. Collective."""
        raise NotImplementedError

    def updated(self) -> dict[str, Tensor]:
        """See `Outcome`. Collective."""
        return {}

    def of_all_experts(self, grad_eXX: Tensor | None) -> Tensor | None:
        """This rank's own gradient, made the mean gradient of all experts."""
        if grad_eXX is None:
            return None
        return everyone(averaged(grad_eXX, self.place, True), self.place.experts["ep"].get_group())


class OwnRouter(nn.Module):
    """A layer of a peer that is one function over an expert-parallel group: behind a router of the ledger's, softmax,
    then top-k."""

    def __init__(self, sizes: Sizes, params: dict[str, Tensor], group: Any) -> None:
        super().__init__()
        self.sizes, self.group = sizes, group
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.to(sizes.dtype).contiguous()))

    def routed(self, h: Tensor, replayed_NK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores [N, E] and ids [N, K]."""
        scores_NE = (h.flatten(0, 1) @ self.router.T).softmax(1)
        return scores_NE, scores_NE.topk(self.sizes.top_k, 1).indices if replayed_NK is None else replayed_NK


class FunctionLayers(Layers):
    """A stack of `OwnRouter`: a peer says in `params` what its parameters are, `gate_up` and `down` among them, in
    `run` how it is called, in `as_the_truth` what its gradients are."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], impl: Impl) -> None:
        group, self.sizes = place.experts["ep"].get_group(), sizes
        e = sizes.num_experts // group.size()
        mine = slice(group.rank() * e, group.rank() * e + e)
        self.stack = nn.ModuleList(
            OwnRouter(sizes, {"router": w.router_ED} | self.params(w.up_EID[mine], w.down_EDF[mine]), group)
            for w in weights
        )
        self.stack.to(place.device).forward = lambda x: residual(self.stack, x, self.layer)
        super().__init__(place, self.stack)

    def layer(self, layer: OwnRouter, h: Tensor) -> Tensor:
        return self.run(layer, h, *layer.routed(h, self.replayed_NK)).view_as(h)

    def params(self, up_eID: Tensor, down_eDF: Tensor) -> dict[str, Tensor]:
        return {"gate_up": up_eID, "down": down_eDF}

    def as_the_truth(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return up, down

    def gradients(self) -> dict[str, Tensor | None]:
        found = {}
        for i, layer in enumerate(self.stack):
            found[f"{i}.router"] = averaged(layer.router.grad, self.place, False)
            parts = [self.of_all_experts(grad) for grad in (layer.gate_up.grad, layer.down.grad)]
            found[f"{i}.up"], found[f"{i}.down"] = self.as_the_truth(*parts)
        return found
