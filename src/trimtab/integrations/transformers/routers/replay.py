"""A transformers model told what to choose while a context is open, and in the recompute of what ran in it.

Beneath whoever watches, each router's `forward` is wrapped for the time: it decides as always, and then `decide` says
what holds instead; weights come from its own live logits by the family's rule. A checkpointed layer that runs again in
the backward, reentrant or not, runs as it did in its first run, also when the context is closed by then.

Legend: T tokens of this rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trimtab.integrations.transformers.routers.find import RouterPlace, Wrapped
from trimtab.integrations.transformers.routers.watch import Forward, Look, Watch

Call = Callable[..., Any]
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""What transformers' layers and torch's CheckpointWrapper call to checkpoint."""


class Decide(Protocol):
    """(the name of a router's run, its own ids [T, K], the model's forward) -> the ids that hold."""

    def __call__(self, name: str, ids_TK: Tensor, forward: Forward | None) -> Tensor: ...


class Session:
    """What one open context does to one model."""

    def __init__(self, model: nn.Module, places: Sequence[RouterPlace], decide: Decide) -> None:
        self._model, self._places, self._decide = model, places, decide
        self._watch: Watch | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The model's forwards within are told."""
        checkpoints = [
            Wrapped(module, name, self._checkpointed)
            for module in self._model.modules()
            for name in CHECKPOINTS
            if callable(getattr(module, name, None))
        ]
        try:
            with self._telling():
                yield
        finally:
            for wrapped in reversed(checkpoints):
                wrapped.remove()

    @contextmanager
    def _telling(self) -> Iterator[Watch]:
        if self._watch is not None:
            yield self._watch
            return
        self._watch = Watch.of(self._model, self._places)
        leave = self._watch.add(Look())
        wrapped = [Wrapped(place.module, "forward", partial(self._tell, place), tells=True) for place in self._places]
        try:
            yield self._watch
        finally:
            self._watch = None
            for one in reversed(wrapped):
                one.remove()
            leave()

    def _tell(self, place: RouterPlace, forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = forward(*args, **kwargs)
        now = None if self._watch is None else self._watch.forward
        ids = place.rule.read(place.module, outputs)[2]
        ids = self._decide(place.name if now is None else now.name(place.name), ids, now)
        return place.rule.of(place.module, args or tuple(kwargs.values()), outputs, ids)

    def _checkpointed(self, checkpoint: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function, *given = args
        at = None if self._watch is None else self._watch.forward
        return checkpoint(_Twice(self, function, at), *given, **kwargs)

    @contextmanager
    def again(self, forward: Forward | None) -> Iterator[None]:
        """A part of a forward runs for the second time, perhaps when the context is closed."""
        with self._telling() as watch:
            before = watch.forward, watch.again
            watch.forward, watch.again = forward, True
            try:
                yield
            finally:
                watch.forward, watch.again = before


class _Twice:
    """A function that a checkpoint runs in a forward, and runs again."""

    def __init__(self, session: Session, function: Call, at: Forward | None) -> None:
        self._session, self._function = session, function
        self._ran, self._at = False, at
        self._turns = dict(at.turns) if at is not None else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._function(*args, **kwargs)
        at = self._at and Forward(self._at.shape, self._at.vision_T, dict(self._turns))
        with self._session.again(at):
            return self._function(*args, **kwargs)


def spread(ids_NK: Tensor, rows_T: Tensor | None) -> Tensor:
    """[T, K] of what a router decided for some of the tokens, -1 for the others."""
    if rows_T is None:
        return ids_NK
    return ids_NK.new_full((rows_T.shape[0], ids_NK.shape[1]), -1).masked_scatter(rows_T[:, None], ids_NK)


def live_where_none(given_NK: Tensor, live_NK: Tensor) -> Tensor:
    """Given ids, and a router's own for tokens without a record."""
    return torch.where(given_NK < 0, live_NK, given_NK)
