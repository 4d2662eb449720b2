"""The forwards of a transformers model, of the whole or of a part that is called in its place: where they begin, and
what their arguments say.

Legend: B sequences, L positions, T tokens of this rank, K experts per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor, nn

from trimtab.integrations.transformers.routers.find import RouterPlace

Call = Callable[..., Any]
INPUTS = ("input_ids", "inputs_embeds")
"""A module whose forward takes one of these is a model, or a part of one that may be called in its place."""


class ModelForward:
    """One forward of the model.

    module: the id of what was called. shape: (sequences, positions) of its input, where that has them. mask: its 2-d
    attention mask, or what the caller says in its place. vision_T: which tokens have experts of their own, where a
    family parts them by modality.
    turns: how often each router has decided in it.
    """

    def __init__(self, module: int, given: dict[str, Any], args: tuple[Any, ...], mask: Tensor | None) -> None:
        self.module = module
        tensors = (*(given.get(name) for name in INPUTS), *args)
        tokens = next((t for t in tensors if isinstance(t, Tensor) and t.dim() >= 2), None)
        self.shape = None if tokens is None else (tokens.shape[0], tokens.shape[1])
        own, vision = given.get("attention_mask"), given.get("moe_mm_token_type_ids")
        self.mask = own if mask is None and isinstance(own, Tensor) and own.dim() == 2 else mask
        self.vision_T = vision.bool().flatten() if isinstance(vision, Tensor) else None
        self.turns: dict[str, int] = {}

    def rows(self, name: str) -> Tensor | None:
        """Which of the tokens the router sees: bool [B * L], None for all."""
        if self.vision_T is None:
            return None
        return self.vision_T if ".vision_moe." in name else ~self.vision_T if ".text_moe." in name else None

    def real(self, ids_TK: Tensor) -> Tensor | None:
        """Which of a router's tokens are no padding, bool [T]; None for all, or where it sees others than those of the
        mask (of an image, say)."""
        if self.mask is None or self.mask.numel() != ids_TK.shape[0]:
            return None
        return self.mask.flatten().bool().to(ids_TK.device)


class InPlace:
    """Stands in the place of a module's `forward`, between `put` and `take_away`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before: Call | None = None

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        found = getattr(vars(module).get("forward"), "__self__", None)
        return found if isinstance(found, cls) and found.module is module else None

    def put(self) -> None:
        if self.of(self.module) is not self:
            self._before = vars(self.module).get("forward")
            self.module.forward = self.run  # a method, which torch.compile does not guard by its identity

    def take_away(self) -> None:
        """Under a wrapper of somebody else it stays, and does nothing."""
        if self.of(self.module) is not self:
            return
        if self._before is None:
            del self.module.forward
        else:
            self.module.forward = self._before

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's `forward` is."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module does without it."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def parts_called(model: nn.Module, places: Sequence[RouterPlace]) -> dict[nn.Module, tuple[str, ...]]:
    """The parts of a model that may be called in its place, below the head say; the names of positional arguments.

    The whole is left out, whose `forward` is looked at by Trainers: who calls it calls a part.
    """
    routers = {place.module for place in places}
    whole = next((module for module in model.modules() if hasattr(type(module), "base_model_prefix")), model)
    inside = [module for module in whole.modules() if module is not whole]
    of_class = {cls: positional(cls) for cls in {type(module) for module in inside}}
    takes = {module: names for module in inside if "inputs_embeds" in (names := of_class[type(module)])}
    return {module: names for module, names in takes.items() if not routers.isdisjoint(module.modules())}


def names_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the positional arguments of a model; those of what it wraps, where it hands on what it gets."""
    found = (names for module in model.modules() if (names := positional(type(module))))
    return next(found, ())


def positional(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of a forward's positional arguments, if tokens are among its arguments."""
    parameters = inspect.signature(cls.forward).parameters
    if not any(name in parameters for name in INPUTS):
        return ()
    return tuple(name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD)[1:]
