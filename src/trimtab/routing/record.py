"""Recording and replaying the decisions of a model's routers.

    with record(model) as recording:
        model(tokens)
    recording.decisions().save("step.pt")

    with replay(model, Decisions.load("step.pt")):
        model(tokens)                               # the same experts; scores, weights and losses are live

Both see the tokens that this rank routes. A forward that runs again under `trimtab.replay_in_recompute` is recorded
once.

Legend: B sequences, L positions, T = B * L tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, InputError
from trimtab.routing.bias import routers
from trimtab.routing.decision import Decision
from trimtab.routing.decisions import Decisions
from trimtab.routing.recompute import replaying
from trimtab.routing.router import Router
from trimtab.routing.select import columns


class Recording:
    """What the routers of a model decided, forward by forward."""

    def __init__(self, found: dict[str, Router]) -> None:
        self.num_experts = {name: router.config.num_experts for name, router in found.items()}
        self.calls: dict[str, list[Tensor]] = {name: [] for name in found}

    def tap(self, name: str) -> Callable[[Decision, int], None]:
        """What router `name` calls with each decision."""

        def keep(made: Decision, batch: int) -> None:
            # A slot without room is where the two differ.
            ids = torch.where(made.kept_TK == made.chosen_TK, made.kept_TK, -2 - made.chosen_TK)
            if not replaying():
                self.calls[name].append(ids.view(batch, ids.shape[0] // max(batch, 1), ids.shape[1]))

        return keep

    def decisions(self, call: int = -1) -> Decisions:
        """Those of one forward of the model, by default the last.

        Raises:
            InputError: there was no such forward in some layer, or layers differ in tokens, K or E.
        """
        counts = {name: len(calls) for name, calls in self.calls.items()}
        if not all(-count <= call < count for count in counts.values()) or len(set(counts.values())) > 1:
            raise InputError(f"no decisions of forward {call} in every layer; forwards recorded by layer: {counts}")
        picked = {name: calls[call] for name, calls in self.calls.items()}
        kinds = {name: (self.num_experts[name], tuple(ids.shape)) for name, ids in picked.items()}
        if len(set(kinds.values())) > 1:
            raise InputError(f"layers differ in (experts, [B, L, K]) and do not make one [B, L, layers, K]: {kinds}")
        return Decisions(
            ids=torch.stack(list(picked.values()), dim=2),
            num_experts=next(iter(self.num_experts.values())),
            layers=tuple(picked),
        )


def _found(model: nn.Module) -> dict[str, Router]:
    found = routers(model)
    if not found:
        raise ConfigError(f"no Router in {type(model).__name__}: nothing to record or to replay")
    return found


@contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """Keep the decisions that `model`'s routers take inside.

    Raises:
        ConfigError: the model has no router.
    """
    found = _found(model)
    recording = Recording(found)
    before = {name: router.tap for name, router in found.items()}
    try:
        for name, router in found.items():
            router.tap = recording.tap(name)
        yield recording
    finally:
        for name, router in found.items():
            router.tap = before[name]


@contextmanager
def replay(model: nn.Module, decisions: Decisions) -> Iterator[None]:
    """Every forward of `model` inside takes these decisions. `ids=` given to a layer goes before them.

    Raises:
        ConfigError: the model has no router.
        InputError: decisions for other layers, or another number of experts, of all or per token; in the forward, for
            other tokens.
    """
    found = _found(model)
    if set(found) != set(decisions.layers):
        raise InputError(f"decisions for the layers {decisions.layers}, but the model's are {tuple(found)}")
    wrong = {n: r.config.num_experts for n, r in found.items() if r.config.num_experts != decisions.num_experts}
    if wrong:
        raise InputError(f"decisions among {decisions.num_experts} experts, but the model has {wrong}")
    K = decisions.ids.shape[3]
    if others := {name: width for name, router in found.items() if (width := columns(router.config)) != K}:
        raise InputError(f"decisions of {K} experts per token, but the model takes {others}")
    before = {name: router.source for name, router in found.items()}

    def source(name: str, device: torch.device) -> Callable[[int, int], Decision]:
        found = decisions.layer(name)
        there = Decision(found.chosen_TK.to(device), found.kept_TK.to(device))

        def give(tokens: int, batch: int) -> Decision:
            has = (batch, tokens // max(batch, 1))
            if has != tuple(decisions.ids.shape[:2]):
                raise InputError(
                    f"decisions for [B, L] = {list(decisions.ids.shape[:2])}, but the layer got {list(has)}",
                    layer=name, phase="route",
                )  # fmt: skip
            return there

        return give

    try:
        for name, router in found.items():
            router.source = source(name, router.weight.device)
        yield
    finally:
        for name, router in found.items():
            router.source = before[name]
