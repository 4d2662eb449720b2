"""`trimtab.record` and `trimtab.replay`, for models with our own routers, those of transformers, or both.

    with trimtab.record(model) as recording:
        model(tokens)
    recording.decisions().save("step.pt")

    with trimtab.replay(model, Decisions.load("step.pt")):
        model(tokens)                               # the same experts; scores, weights and losses are live

Both see the tokens that this rank routes. A forward that runs again in a checkpoint is recorded once.

Legend: B sequences, L positions, T = B * L tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, InputError
from trimtab.integrations.transformers.routers.find import RouterPlace, find_routers
from trimtab.integrations.transformers.routers.replay import Session, live_where_none, spread
from trimtab.integrations.transformers.routers.watch import Forward, Look, Seen, Watch
from trimtab.routing.balance import routers
from trimtab.routing.replay import Decisions, Recording, base_of, check_fits, record_routers, replay_routers
from trimtab.routing.rollouts import Layers, lay_out
from trimtab.routing.router import Router


def _found(model: nn.Module, needed_by: str) -> tuple[dict[str, Router], list[RouterPlace]]:
    own, theirs = routers(model), find_routers(model)
    if not own and not theirs:
        raise ConfigError(
            f"no Router in {type(model).__name__}: {needed_by} is for models with trimtab's or transformers' MoE layers"
        )
    return own, theirs


@contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """Keep the decisions that `model`'s routers take in its forwards inside, those that `replay` hands in too.

    A router that decides more than once in a forward of a transformers model (`inkling2_loop`) is recorded as NAME,
    NAME#2, and so on.

    Raises:
        ConfigError: the model has no router, or one of transformers' that cannot be told.
    """
    own, theirs = _found(model, "record")
    sizes = {name: router.config.num_experts for name, router in own.items()}
    recording = Recording(sizes | {place.name: place.num_experts for place in theirs})

    def keep(name: str, ids_TK: Tensor, forward: Forward) -> None:
        batch = (forward.shape or (1, 0))[0]
        recording.keep(name, ids_TK.view(batch, ids_TK.shape[0] // max(batch, 1), ids_TK.shape[1]))

    def see(seen: Seen) -> None:
        if seen.forward is not None and not seen.again:
            keep(seen.name, spread(seen.ids_TK, seen.forward.rows(seen.name)), seen.forward)

    def ends(forward: Forward) -> None:
        batch, length = forward.shape or (1, 0)
        for place in theirs:
            if place.name not in forward.turns:  # a forward that did not come to it
                keep(place.name, torch.full((batch * length, place.top_k), -1), forward)

    with ExitStack() as stack:
        if own:
            stack.enter_context(record_routers(own, recording))
        if theirs:
            stack.callback(Watch.of(model, theirs).add(Look(see, ends, traced=True)))
        yield recording


@contextmanager
def replay(model: nn.Module, decisions: Decisions) -> Iterator[None]:
    """Every forward of `model` inside takes these decisions. `ids=` given to a layer of ours goes before them.

    Scores, weights and losses are live, from the scores of all experts: group limits and selection biases are skipped,
    normalization and scaling kept, and gradients reach the router. A token of -1 alone is decided live, but by a router
    of ours with a capacity or expert choice, where that says that no expert took it. What a checkpoint of transformers'
    or of torch's CheckpointWrapper runs again, behind the context too, takes the same decisions; around a
    `torch.utils.checkpoint` of your own, take the backward inside.

    Raises:
        ConfigError: the model has no router, or one of transformers' that cannot be told.
        InputError: decisions for other layers, or another number of experts, of all or per token; tokens of which some
            experts are -1 and others not, in a transformers model; in the forward, decisions for other tokens.
    """
    own, theirs = _found(model, "replay")
    sizes = {name: (router.config.num_experts, router.config.columns) for name, router in own.items()}
    check_fits(decisions, sizes | {place.name: (place.num_experts, place.top_k) for place in theirs})
    with ExitStack() as stack:
        if own:
            stack.enter_context(replay_routers(own, decisions))
        if theirs:
            stack.enter_context(Session(model, theirs, _Given(decisions, theirs)).opened())
        yield


def rollout_decisions(
    model: nn.Module,
    routed_experts: Sequence[Any],
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    start_len: int | Sequence[int] = 0,
    layers: Literal["auto", "moe", "all"] = "auto",
) -> Decisions:
    """Decisions to `replay` in a training batch from what an inference engine returned with its samples.

    Args:
        model: that will be trained, for its layers.
        routed_experts: for each sequence what vLLM, TensorRT-LLM and prime-rl return, integers [rows, layers, K] (an
            array or a tensor), or SGLang's base64 of int32; None for a sample without. Rows are its tokens from
            `start_len` on; the last ones may be missing.
        attention_mask: [B, L] of the batch: one sequence in each row, padded left or right.
        position_ids: [B, L] of a packed batch: a sequence begins where they do not go on by one. With an
            `attention_mask` beside it padding is left out; without, padding must have positions that go on.
        start_len: how many tokens of each sequence have no record, because their prefix was cached.
        layers: what the second dim counts: "moe" layers alone, or "all", dense ones too; "auto" goes by its size.

    Tokens without a record are -1: `replay` lets them be decided live.

    Raises:
        ConfigError: the model has no router, routers that cannot be told, or of different sizes.
        InputError: other numbers of samples, tokens, layers or experts than the batch and the model have.
    """
    own, theirs = _found(model, "rollout_decisions")
    if own:
        names, family = tuple(own), "trimtab"
        numbers = tuple(range(len(own)))
        total, sizes = len(own), {(r.config.num_experts, r.config.columns) for r in own.values()}
    else:
        names, family = tuple(place.name for place in theirs), theirs[0].family
        numbers = tuple(place.layer for place in theirs)
        total, sizes = theirs[0].layers, {(place.num_experts, place.top_k) for place in theirs}
    if len(sizes) > 1 or (own and theirs):
        raise ConfigError(f"rollout_decisions: routers of different kinds, (experts, per token) are {sorted(sizes)}")
    ((num_experts, top_k),) = sizes
    found = Layers(names=names, numbers=numbers, total=total, num_experts=num_experts, top_k=top_k, family=family)
    return lay_out(
        routed_experts, found, attention_mask=attention_mask, position_ids=position_ids, start_len=start_len,
        counted=layers,
    )  # fmt: skip


class _Given:
    """Decisions as the routers of a transformers model ask for them."""

    def __init__(self, decisions: Decisions, places: list[RouterPlace]) -> None:
        self._shape = (decisions.ids.shape[0], decisions.ids.shape[1])
        self._family = {place.name: place.family for place in places}
        theirs = [name for name in decisions.layers if base_of(name) in self._family]
        self._layers = {name: decisions.layer(name).kept_TK for name in theirs}
        self._live: dict[str, bool] = {}
        for name, ids in self._layers.items():
            none = ids < 0
            if bool((none.any(-1) & ~none.all(-1)).any()):
                problem = f"{self._family[base_of(name)]}: a token has either all its experts recorded, or none (-1)"
                raise InputError(problem, layer=name, phase="route")
            self._live[name] = bool(none.any())

    def __call__(self, name: str, ids_TK: Tensor, forward: Forward | None) -> Tensor:
        whole, family = self._layers.get(name), self._family[base_of(name)]
        if whole is None:
            problem = f"{family} decides again in one forward, and there are no decisions for that"
            raise InputError(problem, layer=name, phase="route")
        if whole.device != ids_TK.device:
            whole = self._layers[name] = whole.to(ids_TK.device)
        rows = forward.rows(name) if forward else None
        given = whole if rows is None or rows.shape[0] != whole.shape[0] else whole[rows.to(whole.device)]
        shape = forward.shape if forward else None
        if given.shape[0] != ids_TK.shape[0] or shape not in (None, self._shape):
            got = list(shape) if shape else f"{ids_TK.shape[0]} tokens"
            problem = f"{family}: decisions for [B, L] = {list(self._shape)}, but the layer got {got}"
            raise InputError(problem, layer=name, phase="route")
        given = given.to(ids_TK.dtype)
        return live_where_none(given, ids_TK) if self._live[name] else given
