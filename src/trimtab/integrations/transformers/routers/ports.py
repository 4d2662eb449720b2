"""The ports of a transformers model's routers: each router's `forward` is wrapped while anybody observes it.

That is beneath all hooks, of which those of transformers' expert parallelism make ids local; and where wrappers change,
a compiled model is traced anew, which for hooks alone it would not be. A checkpointed layer that runs again in the
backward, reentrant or not, takes what its first run decided, and belongs to the forward of its first run.

A copy of a model (deepcopy, pickle) has ports of its own, with the observers that are `copied`.

Legend: T tokens of this rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from trimtab.autograd import in_backward, not_in_graphs
from trimtab.integrations.transformers.routers.find import RouterPlace
from trimtab.integrations.transformers.routers.forwards import Call, InPlace, ModelForward, parts_called
from trimtab.integrations.transformers.routers.rules import Rule
from trimtab.routing.port import Observer, Port, RouterInfo, RouterRun, carrying
from trimtab.routing.recompute import Taped, noted, running

CHECKPOINTS = {"gradient_checkpointing": "_gradient_checkpointing_func", "checkpoint_fn": "checkpoint_fn"}
"""Modules that have the first call the second to checkpoint: transformers' layers, and torch's CheckpointWrapper."""


class ModelPorts:
    """The ports of one model, in place while they have users.

    now: the forward that is under way, of the outermost part that was called. last: the one before.
    token_mask: bool [B, L] for the coming forwards, where their arguments do not say which tokens are padding.
    used_by: how many observe, or run again.
    """

    def __init__(self) -> None:
        self.now: ModelForward | None = None
        self.last: ModelForward | None = None
        self.token_mask: Tensor | None = None
        self._in_place: dict[InPlace, None] = {}  # in the order of arrival
        self.used_by = 0
        self._checkpoints: dict[nn.Module, str] = {}

    @classmethod
    def of(cls, places: Sequence[RouterPlace]) -> ModelPorts:
        """Those that some of the routers have already, or new ones."""
        found = next((front for place in places if (front := Front.of(place.module))), None)
        return cls() if found is None else found.port.model

    def ports(self, model: nn.Module, places: Sequence[RouterPlace]) -> list[RouterPort]:
        """One for each place; routers, parts of the model and those that checkpoint them are wrapped from `use` on."""
        found = []
        for module, names in parts_called(model, places).items():
            self._in_place[Part.of(module) or Part(self, module, names)] = None
        for place in places:
            front = Front.of(place.module)
            port = RouterPort(place.info, place.rule, self) if front is None else front.port
            if not port.model.used_by:
                port.model = self  # of a router that was copied by itself
            for module in (place.module, *place.others):
                mine = Front.of(module) or Front(port, module)
                if not mine.port.model.used_by:
                    mine.port = port
                self._in_place[mine] = None
            found.append(port)
        for mark, name in CHECKPOINTS.items():
            self._checkpoints |= {module: name for module in model.modules() if hasattr(module, mark)}
        return found

    def use(self) -> None:
        """Wrap, or stay wrapped."""
        self.used_by += 1
        for one in self._in_place:
            one.put()
        self.wrap_checkpoints()

    def leave(self) -> None:
        """Unwrap, if nobody else is left."""
        self.used_by -= 1
        if self.used_by:
            return
        for one in self._in_place:
            one.take_away()
        for module, name in self._checkpoints.items():
            wrapped = getattr(module, name, None)
            if isinstance(wrapped, Checkpointed):
                setattr(module, name, wrapped.checkpoint)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within, routers take what the tape of a recompute has, whoever observes them."""
        self.use()
        try:
            yield
        finally:
            self.leave()

    def wrap_checkpoints(self) -> None:
        """Those that checkpoint by now: it may be switched on after somebody began to observe."""
        for module, name in self._checkpoints.items():
            checkpoint = getattr(module, name, None)
            if checkpoint is not None and not isinstance(checkpoint, Checkpointed):
                setattr(module, name, Checkpointed(self, checkpoint))

    def begins(self, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model, or a part of it, is called: a forward of the model, if none is under way. names: of positional
        arguments."""
        if self.now is None:
            self.wrap_checkpoints()
            self.now = ModelForward(id(module), dict(zip(names, args, strict=False)) | kwargs, args, self.token_mask)

    def ends(self, module: nn.Module, _: Any, output: Any) -> None:
        """A call has ended, in an error if there is no output; the forward, if it was one."""
        if self.now is None or self.now.module != id(module):
            return
        self.last, self.now = self.now, None
        if output is not None:
            for port in dict.fromkeys(front.port for front in self._in_place if isinstance(front, Front)):
                if port.info.name not in self.last.turns:
                    for observer in port.observers:
                        observer.missed(port.info, self.last.shape or (1, 0))

    def of_this_run(self) -> ModelForward | None:
        """The forward that a run of a router belongs to."""
        return self.now if self.now is not None and not running() else self._of_another()

    @not_in_graphs
    def _of_another(self) -> ModelForward | None:
        """That of the first run in a recompute; in a backward that no tape knows the last one."""
        if running():
            return noted(self.now, self)
        return self.last if in_backward() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelPorts, ()


class RouterPort(Port):
    """The port of one router of transformers, and of the others that peft keeps beside it."""

    def __init__(self, info: RouterInfo, rule: Rule, model: ModelPorts, observers: Sequence[Observer] = ()) -> None:
        super().__init__(info, observers)
        self.rule, self.model = rule, model

    def __reduce__(self) -> tuple[Any, ...]:
        return RouterPort, (self.info, self.rule, self.model, self._copied())


class Part(InPlace):
    """A part of a model that may be called in its place: its forward is one of the model, if none is under way."""

    def __init__(self, model: ModelPorts, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(module)
        self._model, self._names = model, names

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, which ends in an error too."""
        if self._model.now is not None:
            return self.forward(*args, **kwargs)
        self._model.begins(self._names, self.module, args, kwargs)
        output = None
        try:
            output = self.forward(*args, **kwargs)
        finally:
            self._model.ends(self.module, args, output)
        return output


class Front(InPlace):
    """A router; `run` is the whole port of transformers' routers."""

    def __init__(self, port: RouterPort, module: nn.Module) -> None:
        super().__init__(module)
        self.port = port

    def take_away(self) -> None:
        """In a copy of a model observers may be left."""
        if not self.port.observers:
            super().take_away()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The router's forward, with other ids where an observer or a recompute decides."""
        port, router = self.port, self.module
        if not port.observers and not running():
            return self.forward(*args, **kwargs)
        now, forward, name = port.model.now, port.model.of_this_run(), port.info.name
        if now is not None:
            now.turns[name] = now.turns.get(name, 0) + 1
        outputs = self.forward(*args, **kwargs)
        logits_TE, weights, ids_TK = port.rule.read(router, outputs)
        run = RouterRun(
            port, router, ids=ids_TK, logits_TE=logits_TE, scores=partial(port.rule.scores, router, logits_TE),
            shape=None if now is None else now.shape or (1, ids_TK.shape[0]),
            turn=1 if now is None else now.turns[name],
            rows_T=None if forward is None else forward.rows(name),
            real=None if forward is None else partial(forward.real, ids_TK),
        )  # fmt: skip
        if port.decide(run):
            given = args or tuple(kwargs.values())
            outputs = port.rule.of(router, given, outputs, run.ids_TK.to(ids_TK.dtype))
            weights = port.rule.read(router, outputs)[1]
        loss = port.see(run)
        if loss is None:
            return outputs
        carrier = next((i for i, output in enumerate(outputs) if output is weights), 0)
        return tuple(carrying(output, loss) if i == carrier else output for i, output in enumerate(outputs))


class Checkpointed:
    """Stands in the place of a function that checkpoints: what it runs twice decides once."""

    def __init__(self, model: ModelPorts, checkpoint: Call) -> None:
        self._model, self.checkpoint = model, checkpoint

    def __call__(self, function: Call, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(Taped(function, self._model.used), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.checkpoint,)


def _same(checkpoint: Call) -> Call:
    return checkpoint
