"""Observers of all routers that a model has: trimtab's, also those in the place of Megatron's, and transformers'; so
are record and replay.

    with trimtab.record(model) as recording:
        model(tokens)
    recording.decisions().save("step.pt")

    with trimtab.replay(model, Decisions.load("step.pt")):
        model(tokens)                               # the same experts; scores, weights and losses are live

Legend: B sequences, L positions, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import find_routers, plain
from trimtab.integrations.transformers.routers.forwards import names_of
from trimtab.integrations.transformers.routers.ports import ModelPorts
from trimtab.routing.observers import Recorder, Replayer
from trimtab.routing.port import Observer, Port
from trimtab.routing.replay import Decisions
from trimtab.routing.rollouts import lay_out


class Observed:
    """Observers of a model's routers, until `remove`. The last one added has the last word on a decision.

    Args:
        model: with trimtab's, Megatron's or transformers' MoE layers, wrapped or not.
        observers: each of one model.

    Attributes:
        token_mask: bool [B, L] for the coming forwards of a transformers model: which tokens are no padding, where the
            arguments have no 2-d `attention_mask` that says so.

    Raises:
        ConfigError: no router, or one of transformers' that cannot be observed; what an observer does not take.
    """

    def __init__(self, model: nn.Module, *observers: Observer) -> None:
        places, own = find_routers(model), own_ports(model)
        self.routers = {port.info.name: port.info for port in own} | {place.name: place.info for place in places}
        if not self.routers:
            raise ConfigError(
                f"no Router in {type(model).__name__}: observers, record and replay are for models with trimtab's or "
                "transformers' MoE layers"
            )
        device = next(model.parameters()).device
        for observer in observers:
            observer.begin(self.routers, device)
        self._observers = observers
        self._model = ModelPorts.of(places) if places else None
        self._ports: list[Port] = [*own, *(self._model.ports(model, places) if self._model else ())]
        self._hooks: list[Any] = []
        if self._model is not None:
            begins = partial(self._model.begins, names_of(model))
            self._hooks = [
                model.register_forward_pre_hook(begins, with_kwargs=True, prepend=True),
                model.register_forward_hook(self._model.ends, always_call=True),
            ]
            self._model.use()
        for port in self._ports:
            port.add(observers)

    @property
    def token_mask(self) -> Tensor | None:
        return None if self._model is None else self._model.token_mask

    @token_mask.setter
    def token_mask(self, mask: Tensor | None) -> None:
        if self._model is not None:
            self._model.token_mask = mask

    def remove(self) -> None:
        """The model runs as if these had never been."""
        for port in self._ports:
            port.remove(self._observers)
        for hook in self._hooks:
            hook.remove()
        if self._model is not None and self._ports:
            self._model.leave()
        self._ports = []


def own_ports(model: nn.Module) -> list[Port]:
    """Those that a module has as its attribute `port`, named by the module."""
    found = []
    for name, module in model.named_modules():
        port = getattr(module, "port", None)
        if isinstance(port, Port):
            port.info = replace(port.info, name=plain(name))
            found.append(port)
    return found


@contextmanager
def observing(model: nn.Module, *observers: Observer) -> Iterator[Observed]:
    """Adds observers to the model's routers, see `Observed`, and removes them at the end."""
    observed = Observed(model, *observers)
    try:
        yield observed
    finally:
        observed.remove()


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Keep the decisions that `model`'s routers take in its forwards inside, those that `replay` hands in too: of the
    tokens that this rank routes, once where a checkpoint runs again.

    A router that decides more than once in a forward of a transformers model (`inkling2_loop`) is recorded as NAME,
    NAME#2, and so on.

    Raises:
        ConfigError: the model has no router, or one of transformers' that cannot be told.
    """
    recorder = Recorder()
    with observing(model, recorder):
        yield recorder


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
    with observing(model, Replayer(decisions)):
        yield


def rollout_decisions(
    model: nn.Module, routed_experts: Sequence[Any], *, attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None, start_len: int | Sequence[int] | None = None,
    layers: Literal["auto", "moe", "all"] = "auto",
) -> Decisions:  # fmt: skip
    """Decisions to `replay` in a training batch from what an inference engine returned with its samples.

    Args:
        model: that will be trained, for its layers.
        routed_experts: for each sequence what vLLM, TensorRT-LLM and prime-rl return, integers [rows, layers, K] (an
            array or a tensor), or SGLang's base64 of int32; None for a sample without. Rows are its tokens from
            `start_len` on; the last one may be missing.
        attention_mask: [B, L] of the batch: one sequence in each row, padded left or right.
        position_ids: [B, L] of a packed batch: a sequence begins where they do not go on by one. With an
            `attention_mask` beside it padding is left out; without, padding must have positions that go on.
        start_len: how many tokens of each sequence have no record, because their prefix was cached. Where it is given,
            any number of the last ones may be missing.
        layers: what the second dim counts: "moe" layers alone, or "all", dense ones too; "auto" goes by its size.

    Tokens without a record are -1: `replay` lets them be decided live.

    Raises:
        ConfigError: the model has no router, routers that cannot be told, or of different sizes.
        InputError: other numbers of samples, tokens, layers or experts than the batch and the model have.
    """
    own, theirs = own_ports(model), find_routers(model)
    if not own and not theirs:
        raise ConfigError(f"no Router in {type(model).__name__}: rollout_decisions is for models with MoE layers")
    routers = [(port.info, i) for i, port in enumerate(own)] + [(place.info, place.layer) for place in theirs]
    return lay_out(
        routed_experts, routers, len(own) or theirs[0].layers, attention_mask=attention_mask,
        position_ids=position_ids, start_len=start_len, counted=layers,
    )  # fmt: skip
