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

Legend: R expert rows, e experts, A in features, B out features, C either width. offsets_e: [e + 1].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import BackendError, InputError
from trimtab.experts.recipes.blocks import Segments
from trimtab.experts.recipes.describe import ErrorBound, Formats
from trimtab.experts.recipes.machine import Backend, Hardware, check_backend_name, missing
from trimtab.experts.recipes.quantised import Quantised
from trimtab.validation import check_flags

if TYPE_CHECKING:
    from trimtab.experts.recipes.engine import Engine

RowsAlong = Literal["row", "column"]
RowsRole = Literal["activation", "gradient"]
WeightAlong = Literal["in", "out"]
Way = Literal["emulated", "hardware"]


class Operands:
    """What the products of one call multiply. alignment: the recipe's, which defines `rows` and `stacked`.

    `activation`, `weight` and `gradient` return float32 of the shape they were given, read nothing on the host and work
    on the meta device. Segment i of the rows is offsets_e[i] .. offsets_e[i + 1] - 1; each offset is a multiple of the
    recipe's `alignment`. Scales never cross a segment. Rows from offsets_e[-1] on are padding: they come out zero and
    influence no scale, whatever they hold. NaN and Inf anywhere else come out as NaN or Inf.
    """

    alignment: int

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        """Quantise clean float32 rows [R, C]."""
        raise NotImplementedError

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        """Quantise float32 weights [e, A, B]."""
        raise NotImplementedError

    @torch.no_grad()
    def quantise_rows(self, x_RC: Tensor, offsets_e: Tensor, along: RowsAlong, role: RowsRole) -> Quantised:
        """As `activation` and `gradient`, before the scales are multiplied back."""
        _one_of(along, ("row", "column"))
        segments = Segments(x_RC.shape[0], offsets_e, self.alignment)
        return self.rows(segments.clean(x_RC), segments, along, role)

    @torch.no_grad()
    def quantise_weight(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        """As `weight`, before the scales are multiplied back."""
        _one_of(along, ("in", "out"))
        if w_eAB.dim() != 3:
            raise InputError(f"weights of shape {tuple(w_eAB.shape)}: expected [experts, in, out]")
        return self.stacked(w_eAB.float(), along)

    def activation(self, x_RA: Tensor, offsets_e: Tensor, along: RowsAlong) -> Tensor:
        """[R, A]. "row": the product contracts A (forward). "column": it contracts each segment's rows (wgrad)."""
        return self.quantise_rows(x_RA, offsets_e, along, "activation").dequantised()

    def weight(self, w_eAB: Tensor, along: WeightAlong) -> Tensor:
        """[e, A, B], held as [expert, in, out]. "in": the product contracts A (forward). "out": B (dgrad)."""
        return self.quantise_weight(w_eAB, along).dequantised()

    def gradient(self, dy_RB: Tensor, offsets_e: Tensor, along: RowsAlong) -> Tensor:
        """[R, B]. "row": the product contracts B (dgrad). "column": it contracts each segment's rows (wgrad)."""
        return self.quantise_rows(dy_RB, offsets_e, along, "gradient").dequantised()


class RecipeState(Operands, nn.Module):
    """The mutable part of a recipe, one per module; buffers only, so that state dicts carry it.

    Used directly, each of its methods is a call of its own.

    Args:
        alignment: the recipe's. Not read in a state that defines `activation`, `weight` and `gradient` itself.
    """

    def __init__(self, alignment: int = 1) -> None:
        super().__init__()
        self.alignment = alignment

    def reserve(self, num_groups: int) -> None:
        """Give buffers that have one entry per expert their full shape before a first call.

        Optional: without it they take their shape at the first call. Checkpoint loaders that fill tensors in place
        need it. Does nothing in a state without such buffers, or where they have this shape already.
        """

    def call(self) -> Operands:
        """For one forward and its backward. Made inside a backward, it is for a forward that is computed again."""
        return self


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A low-precision recipe: frozen, hashable, compared by value.

    name: how users call it, e.g. "mxfp8". alignment: rows per expert segment must be multiples of it.

    backend: "emulated" computes the same values with ordinary arithmetic, on any device, slowly; "hardware" is
        refused by `check` where it cannot run; "auto" is hardware where it can run and emulation elsewhere, and the
        layer says which. None is a default: nobody emulates without having said so.
    """

    name: ClassVar[str]
    alignment: ClassVar[int]

    backend: Backend

    def __post_init__(self) -> None:
        check_backend_name(self.backend)
        check_flags(**{f.name: getattr(self, f.name) for f in fields(self) if f.type in (bool, "bool")})

    def hardware(self) -> Hardware:
        """The real kernel that computes these products, and what it runs on."""
        raise NotImplementedError

    def formats(self) -> Formats:
        """What is stored of each operand."""
        raise NotImplementedError

    def error_bound(self) -> ErrorBound:
        """How far elements and products can be off. Formulas in `describe`."""
        raise NotImplementedError

    def state(self) -> RecipeState:
        """A fresh state, for one module."""
        raise NotImplementedError

    def engine(self) -> Engine | None:
        """The kernel that multiplies quantised operands as they are stored; None where trimtab calls none."""
        return None

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        """How products of these widths are computed on `device`. Emulation takes every device and every width: blocks
        at an edge may be cut short.

        Raises:
            BackendError: the recipe cannot run there; says what it needs and what this machine has.
        """
        if self.backend == "emulated":
            return "emulated"
        fault = missing(self.name, self.hardware(), device, in_features, out_features)
        if fault is None:
            return "hardware"
        if self.backend == "auto":
            return "emulated"
        raise BackendError(f"{fault}: use backend='emulated' or 'auto' for the same numbers on any device")


def _one_of(along: str, allowed: tuple[str, str]) -> None:
    if along not in allowed:
        raise InputError(f"along={along!r}: choose one of {allowed}")
