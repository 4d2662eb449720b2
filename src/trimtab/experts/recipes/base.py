"""What a low-precision recipe is: a frozen value that describes the formats, and a state that a module owns.

    recipe = MXFP8(backend="emulated")
    recipe.check(device, in_features, out_features)      refused here, at construction, or never
    state = recipe.state()                               an nn.Module: its buffers are saved with the layer
    call = state.call()                                  one forward and its backward

    y  = call.activation(x, offsets, along="row")    @ call.weight(w, along="in")           forward
    dx = call.gradient(dy, offsets, along="row")     @ call.weight(w, along="out")^T        dgrad
    dw = call.activation(x, offsets, along="column")^T @ call.gradient(dy, offsets, along="column")   wgrad

`along` names the axis that the product contracts, because that is the axis along which scaling blocks lie. Each
method quantises and dequantises at once: the values it returns are exactly those the hardware would multiply, in
float32, so that an ordinary GEMM with float32 accumulation reproduces the hardware's product.

Legend: R expert rows, e experts, A in features, B out features. offsets_e: [e + 1].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trimtab.experts.recipes.engine import Engine

RowsAlong = Literal["row", "column"]
RowsRole = Literal["activation", "gradient"]
WeightAlong = Literal["in", "out"]
Backend = Literal["emulated", "hardware", "auto"]
Way = Literal["emulated", "hardware"]


class Operands:
    """What the products of one call multiply.

    All three methods return float32 of the shape they were given, read nothing on the host and work on the meta
    device. Segment i of the rows is offsets_e[i] .. offsets_e[i + 1] - 1; each offset is a multiple of the recipe's
    `alignment`. Scales never cross a segment. Rows from offsets_e[-1] on are padding: they come out zero and
    influence no scale, whatever they hold. NaN and Inf anywhere else come out as NaN or Inf.
    """

    def activation(self, x_RA: Tensor, offsets_e: Tensor, along: RowsAlong) -> Tensor:
        """[R, A]. "row": the product contracts A (forward). "column": it contracts each segment's rows (wgrad)."""
        raise NotImplementedError

    def weight(self, w_eAB: Tensor, along: WeightAlong) -> Tensor:
        """[e, A, B], held as [expert, in, out]. "in": the product contracts A (forward). "out": B (dgrad)."""
        raise NotImplementedError

    def gradient(self, dy_RB: Tensor, offsets_e: Tensor, along: RowsAlong) -> Tensor:
        """[R, B]. "row": the product contracts B (dgrad). "column": it contracts each segment's rows (wgrad)."""
        raise NotImplementedError


class RecipeState(Operands, nn.Module):
    """The mutable part of a recipe, one per module; buffers only, so that state dicts carry it.

    Used directly, each of its three methods is a call of its own.
    """

    def reserve(self, num_groups: int) -> None:
        """Give buffers that have one entry per expert their full shape before a first call.

        Optional: without it they take their shape at the first call. Checkpoint loaders that fill tensors in place
        need it. Does nothing in a state without such buffers, or where they have this shape already.
        """

    def call(self) -> Operands:
        """For one forward and its backward. Made inside a backward, it is for a forward that is computed again."""
        return self


class Recipe(Protocol):
    """A low-precision recipe: frozen, hashable, compared by value."""

    @property
    def name(self) -> str:
        """How users call it, e.g. "mxfp8"."""
        ...

    @property
    def alignment(self) -> int:
        """Rows per expert segment must be multiples of this; the offsets of the layout provide it."""
        ...

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        """How products of these widths are computed on `device`.

        Raises:
            BackendError: the recipe cannot run there; says what it needs and what this machine has.
        """
        ...

    def state(self) -> RecipeState:
        """A fresh state, for one module."""
        ...

    def engine(self) -> Engine | None:
        """What multiplies on hardware; None where there is nothing of the kind."""
        ...
