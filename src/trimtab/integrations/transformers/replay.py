"""Decisions of a transformers model seen and told, while a context is open, and in the recompute of what ran in it.

Each router's `forward` is wrapped for the time: it decides as always, and then `decide` says what holds instead;
weights come from its own live logits by the family's rule. A checkpointed layer that runs again in the backward,
reentrant or not, runs as it did in its first run, also when the context is closed by then, and is not seen again.

Legend: T tokens of this rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trimtab.integrations.transformers.routers import RouterPlace, Wrapped
from trimtab.routing.recompute import replaying

Call = Callable[..., Any]
Given = tuple[Any, ...]
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""What transformers' layers and torch's CheckpointWrapper call to checkpoint."""


class Decide(Protocol):
    """(the router's name, its own ids [T, K], the model's forward) -> the ids that hold."""

    def __call__(self, name: str, ids_TK: Tensor, forward: Forward | None) -> Tensor: ...


class See(Protocol):
    """(a router, the name for this call, the ids that hold [T, K], the model's forward), once for each call that is no
    recompute; no ids for a router that a forward did not come to."""

    def __call__(self, place: RouterPlace, name: str, ids_TK: Tensor | None, forward: Forward) -> None: ...


class Forward:
    """One forward of the model. shape: (sequences, positions) of its input, where that has them. vision_T: which tokens
    have experts of their own, where a family parts them by modality. turns: how often each router has decided in it."""

    def __init__(self, shape: tuple[int, int] | None, vision_T: Tensor | None, turns: dict[str, int]) -> None:
        self.shape, self.vision_T, self.turns = shape, vision_T, turns

    def rows(self, name: str) -> Tensor | None:
        """Which of the tokens the router sees: bool [T], None for all."""
        if self.vision_T is None:
            return None
        return self.vision_T if ".vision_moe." in name else ~self.vision_T if ".text_moe." in name else None

    @classmethod
    def of(cls, args: Given, kwargs: dict[str, Any]) -> Forward:
        """From what the model is called with."""
        named = (kwargs.get(key) for key in ("input_ids", "inputs_embeds"))
        tokens = next((t for t in (*named, *args) if isinstance(t, Tensor) and t.dim() >= 2), None)
        vision = kwargs.get("moe_mm_token_type_ids")
        parted = vision.bool().flatten() if isinstance(vision, Tensor) else None
        return cls(None if tokens is None else (tokens.shape[0], tokens.shape[1]), parted, {})


class Session:
    """What one open context does to one model."""

    def __init__(
        self, model: nn.Module, places: Sequence[RouterPlace], decide: Decide | None = None, see: See | None = None
    ) -> None:
        self._model, self._places, self._decide, self._see = model, places, decide, see
        self._forward: Forward | None = None
        self._open = self._again = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The model's forwards within are seen and told."""
        hooks = [
            self._model.register_forward_pre_hook(self._begins, with_kwargs=True, prepend=True),
            self._model.register_forward_hook(self._ends, always_call=True),
        ]
        checkpoints = [
            Wrapped(module, name, self._checkpointed)
            for module in self._model.modules()
            for name in CHECKPOINTS
            if callable(getattr(module, name, None))
        ]
        try:
            with self._routers():
                yield
        finally:
            for wrapped in reversed(checkpoints):
                wrapped.remove()
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _routers(self) -> Iterator[None]:
        if self._open:
            yield
            return
        wrapped = [
            Wrapped(place.module, "forward", partial(self._decides, place), tells=self._decide is not None)
            for place in self._places
        ]
        self._open = True
        try:
            yield
        finally:
            self._open = False
            for one in reversed(wrapped):
                one.remove()

    def _begins(self, _: nn.Module, args: Given, kwargs: dict[str, Any]) -> None:
        self._forward = Forward.of(args, kwargs)

    def _ends(self, _: nn.Module, __: Given, output: Any) -> None:
        now, self._forward = self._forward, None
        for place in self._places:
            if self._see is not None and now is not None and output is not None and place.name not in now.turns:
                self._see(place, place.name, None, now)

    def _decides(self, place: RouterPlace, forward: Call, args: Given, kwargs: dict[str, Any]) -> Any:
        outputs = forward(*args, **kwargs)
        name, now = place.name, self._forward
        if now is not None:
            turn = now.turns.get(name, 0) + 1
            now.turns[name] = turn
            name = name if turn == 1 else f"{name}#{turn}"
        ids = place.rule.read(place.module, outputs)[2]
        if self._decide is not None:
            ids = self._decide(name, ids, now)
            outputs = place.rule.of(place.module, args or tuple(kwargs.values()), outputs, ids)
        if self._see is not None and now is not None and not (self._again or replaying()):
            self._see(place, name, ids, now)
        return outputs

    def _checkpointed(self, checkpoint: Call, args: Given, kwargs: dict[str, Any]) -> Any:
        function, *given = args
        return checkpoint(_Twice(self, function), *given, **kwargs)

    @contextmanager
    def again(self, forward: Forward | None) -> Iterator[None]:
        """A part of a forward runs for the second time, perhaps when the context is closed."""
        before = self._forward, self._again
        self._forward, self._again = forward, True
        try:
            with self._routers():
                yield
        finally:
            self._forward, self._again = before


class _Twice:
    """A function that a checkpoint runs, and runs again."""

    def __init__(self, session: Session, function: Call) -> None:
        self._session, self._function = session, function
        self._ran, self._at = False, session._forward
        self._turns = dict(self._at.turns) if self._at is not None else {}

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
