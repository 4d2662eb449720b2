"""What a low-precision recipe is: a frozen value that describes formats and scales, and a state that a module owns.

    recipe = MXFP8(backend="emulated")
    recipe.check(device, in_features, out_features)      refused here, at construction, or never
    state = recipe.state()                               an nn.Module: its buffers are saved with the layer
    call = state.call()                                  one forward and its backward

    y  = call.activation(x, offsets, along="row")    @ call.weight(w, along="in")           forward
    dx = call.gradient(dy, offsets, along="row")     @ call.weight(w, along="out")^T        dgrad
    dw = call.activation(x, offsets, along="column")^T @ call.gradient(dy, offsets, along="column")   wgrad

`along` names the axis that the product contracts: scaling blocks lie along it. Each method rounds to the recipe's
format: its values, in float32, are those that the hardware would multiply.

Legend: R expert rows, e experts, A in features, B out features, C either width. offsets_e: [e + 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from trimtab.errors import BackendError, ConfigError, InputError
from trimtab.experts.recipes.hardware import Engine
from trimtab.experts.recipes.numbers import E4M3, Blocks, ElementFormat, Encoded, Scale, encode, float_scale
from trimtab.validation import check_flags

Role = Literal["activation", "gradient", "weight"]
Along = Literal["row", "column", "in", "out"]
Way = Literal["emulated", "hardware"]
Backend = Literal["emulated", "hardware", "auto"]


class Operands:
    """What the products of one call multiply.

    Nothing is read on the host, and all of it works on the meta device. Segment i of the rows is offsets_e[i] ..
    offsets_e[i + 1] - 1, offsets being multiples of the recipe's `alignment`. Scales never cross a segment. Rows from
    offsets_e[-1] on come out zero and influence no scale, whatever they hold.
    """

    recipe: Recipe

    def scale(self, blocks: Blocks, form: ElementFormat, role: Role) -> Scale:
        """Of each block."""
        return self.recipe.scale(blocks.amax(), form)

    def dither(self, x: Tensor, role: Role) -> Tensor | None:
        """For stochastic rounding: uniform numbers of x's shape; None to round to the nearest."""
        return None

    @torch.no_grad()
    def encode(self, x: Tensor, offsets_e: Tensor | None, role: Role, along: Along) -> Encoded:
        """Rows [R, C] of any floating dtype, or where role is "weight", and offsets_e None, weights [e, A, B].

        Raises:
            InputError: the shape, or `along`, is not one for this role.
        """
        allowed, dims = (("in", "out"), 3) if role == "weight" else (("row", "column"), 2)
        if along not in allowed or x.dim() != dims:
            raise InputError(f"{role} of shape {tuple(x.shape)}, along={along!r}: need {dims} axes, one of {allowed}")
        form = self.recipe.form(role)
        blocks = Blocks(x, *self.recipe.block(role, along), offsets_e)
        scale = self.scale(blocks, form, role)
        values = encode(blocks.x, blocks.spread(scale.encode), form, self.dither(blocks.x, role))
        stored = scale.decode if scale.stored is None else scale.stored
        return Encoded(values, stored, blocks.spread(scale.decode))

    def activation(self, x_RA: Tensor, offsets_e: Tensor, along: Along) -> Tensor:
        """[R, A]. "row": the product contracts A (forward). "column": it contracts each segment's rows (wgrad)."""
        return self.encode(x_RA, offsets_e, "activation", along).decoded()

    def gradient(self, dy_RB: Tensor, offsets_e: Tensor, along: Along) -> Tensor:
        """[R, B]. "row": the product contracts B (dgrad). "column": it contracts each segment's rows (wgrad)."""
        return self.encode(dy_RB, offsets_e, "gradient", along).decoded()

    def weight(self, w_eAB: Tensor, along: Along) -> Tensor:
        """[e, A, B], held as [expert, in, out]. "in": the product contracts A (forward). "out": B (dgrad)."""
        return self.encode(w_eAB, None, "weight", along).decoded()


class RecipeState(Operands, nn.Module):
    """The part of a recipe that changes, one per weight; buffers only, so that state dicts carry it.

    Used directly, each of its methods is a call of its own. One of one's own may define `activation`, `weight` and
    `gradient` alone.
    """

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__()
        if recipe is not None:
            self.recipe = recipe

    def reserve(self, num_groups: int) -> None:
        """Give buffers that have one entry per expert their full shape before a first call."""

    def call(self) -> Operands:
        """For one forward and its backward. Made inside a backward, it is for a forward that is computed again."""
        return self


class StateBuffers(nn.Module):
    """Buffers of a state. What was on the meta device begins anew; a checkpoint without the recipe changes nothing."""

    def begin(self) -> None:
        """Set the buffers as they are before a first call."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        unset = any(buffer.is_meta for buffer in self.buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if unset and not any(buffer.is_meta for buffer in self.buffers()):
            self.begin()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if any(f"{prefix}{name}" in state_dict for name, _ in self.named_buffers()):
            super()._load_from_state_dict(state_dict, prefix, *args)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A low-precision recipe: frozen, hashable, compared by value.

    Each has a name, and an `alignment` that rows per expert segment must be multiples of.

    backend: "emulated" computes the same values with ordinary arithmetic, on any device, slowly; "hardware" is
        refused by `check` where it cannot run; "auto" is hardware where it can run and emulation elsewhere.
    """

    name: ClassVar[str]
    alignment: ClassVar[int]
    no_engine: ClassVar[str] = "trimtab calls no kernel for it"

    backend: Backend

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ConfigError(f"backend {self.backend!r} of a recipe: choose one of {get_args(Backend)}")
        check_flags(**{f.name: getattr(self, f.name) for f in fields(self) if f.type in (bool, "bool")})

    def form(self, role: Role) -> ElementFormat:
        """What elements are rounded to."""
        return E4M3

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        """(rows, columns) that share a scale; 0 for all of a segment or matrix."""
        raise NotImplementedError

    def scale(self, amax: Tensor, form: ElementFormat) -> Scale:
        """Of blocks with these largest magnitudes, float32."""
        return float_scale(amax, form)

    def state(self) -> RecipeState:
        """A fresh state, for one weight."""
        return RecipeState(self)

    def engine(self) -> Engine | None:
        """The hardware's products; None where trimtab calls none."""
        return None

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        """How products of these widths are computed on `device`. Emulation takes every device and every width.

        Raises:
            BackendError: the recipe cannot run there; says what it needs and what this machine has.
        """
        if self.backend == "emulated":
            return "emulated"
        engine = self.engine()
        lacks = self.no_engine if engine is None else engine.lacks(device, in_features, out_features)
        if not lacks:
            return "hardware"
        if self.backend == "auto":
            return "emulated"
        raise BackendError(
            f"recipe {self.name!r} with backend='hardware': {lacks}. Use backend='emulated' or 'auto' for the same "
            "numbers on any device"
        )
