"""The three products of one grouped weight in one call: as they are, emulated in low precision, or on its hardware.

    forward   y[segment i]  = x[segment i] w[i] + b[i]          zero behind the last segment
    dgrad     dx[segment i] = dy[segment i] w[i]^T              zero behind the last segment
    wgrad     dw[i] = x[segment i]^T dy[segment i]              of operands that `keep` made earlier

Legend: S rows in segments, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from trimtab.experts.per_group import Gradients, take
from trimtab.experts.recipes.base import Operands, Recipe, RecipeState, Role, Way
from trimtab.experts.recipes.hardware import Engine
from trimtab.kernels.compiled import at_once
from trimtab.kernels.grouped import Block, Kernels, put

Kept = tuple[Tensor, ...]


@dataclass(frozen=True)
class GroupWeights:
    """A grouped weight: [e, B, A] or e of [B, A]. Its bias: [e, B], e of [B], or none."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    stacked: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    @property
    def groups(self) -> slice:
        return slice(0, self.weights[0].shape[0] if self.stacked else len(self.weights))

    @property
    def widths(self) -> tuple[int, int]:
        """A, B."""
        return self.weights[0].shape[-1], self.weights[0].shape[-2]

    def by_row(self, e: slice) -> Tensor:
        """[e, A, B]."""
        return take(self.weights, self.stacked, e).transpose(1, 2)


class Products(Protocol):
    """For one call of one weight."""

    def forward(self, x_SA: Tensor, w: GroupWeights) -> Tensor:
        """[S, B] in the weight's dtype."""
        ...

    def dgrad(self, dy_SB: Tensor, w: GroupWeights) -> Tensor:
        """[S, A] in the weight's dtype."""
        ...

    def keep(self, rows_SC: Tensor, role: Role) -> Kept:
        """An operand of `wgrad`."""
        ...

    def wgrad(self, x: Kept, dy: Kept, into: Gradients) -> None:
        """The gradient of a [e, B, A] weight."""
        ...


class Plain:
    """Ordinary grouped GEMMs, of operands as they are or as a recipe's emulation makes them."""

    def __init__(self, kernels: Kernels, offsets_e: Tensor, operands: Operands | None = None) -> None:
        self.kernels, self.offsets_e, self.operands = kernels, offsets_e, operands

    def forward(self, x_SA: Tensor, w: GroupWeights) -> Tensor:
        rows = x_SA if self.operands is None else self.operands.activation(x_SA, self.offsets_e, "row")
        return self._product(rows, w, transpose=False)

    def dgrad(self, dy_SB: Tensor, w: GroupWeights) -> Tensor:
        rows = dy_SB if self.operands is None else self.operands.gradient(dy_SB, self.offsets_e, "row")
        return self._product(rows, w, transpose=True)

    def keep(self, rows_SC: Tensor, role: Role) -> Kept:
        if self.operands is None:
            return (rows_SC,)
        make = self.operands.activation if role == "activation" else self.operands.gradient
        return (make(rows_SC, self.offsets_e, "column"),)

    def wgrad(self, x: Kept, dy: Kept, into: Gradients) -> None:
        dtype = self.kernels.compute_dtype(dy[0].dtype)
        for block in self._blocks(dy[0].shape[0], into.stack):
            a, b = x[0][block.rows].to(dtype), dy[0][block.rows].to(dtype)
            with into.block(block.experts) as (out_eBA, add):
                self.kernels.grouped_wgrad(a, b, block, out_eBA.transpose(1, 2), add=add)

    def _blocks(self, rows: int, stack_eBA: Tensor | None) -> Iterator[Block]:
        """A group each, but all in one where their weights are one tensor that is multiplied at once."""
        whole = stack_eBA is not None and at_once(self.kernels, stack_eBA)
        return self.kernels.blocks(self.offsets_e, rows, rows + 1 if whole else 0)

    def _product(self, rows_SX: Tensor, w: GroupWeights, *, transpose: bool) -> Tensor:
        """Rows times w, plus bias, or with `transpose` times w^T: [S, Y]."""
        kernels, dtype = self.kernels, self.kernels.compute_dtype(rows_SX.dtype)
        quantised_eAB = None
        if self.operands is not None:
            quantised_eAB = self.operands.weight(w.by_row(w.groups), "out" if transpose else "in")
        width = w.widths[0 if transpose else 1]
        result_SY = kernels.empty_rows(rows_SX.shape[0], width, w.dtype, self.offsets_e)
        direct = dtype == w.dtype
        for block in self._blocks(rows_SX.shape[0], w.weights[0] if w.stacked else None):
            e, r = block.experts, block.rows
            w_eAB = w.by_row(e) if quantised_eAB is None else quantised_eAB[e]
            w_eXY = w_eAB.transpose(1, 2) if transpose else w_eAB
            out = kernels.grouped_mm(rows_SX[r].to(dtype), w_eXY, block, result_SY[r] if direct else None)
            if w.biases and not transpose:
                out += kernels.expand(take(w.biases, w.stacked, e).to(dtype), block)
            if not direct:
                result_SY[r] = out
        return result_SY


class Hardware:
    """The recipe's own kernels. Biases are added, and weight gradients put where they belong, by `kernels`."""

    def __init__(self, kernels: Kernels, offsets_e: Tensor, call: Operands, engine: Engine) -> None:
        self.kernels, self.offsets_e, self.call, self.engine = kernels, offsets_e, call, engine

    def forward(self, x_SA: Tensor, w: GroupWeights) -> Tensor:
        y_SB = self._product(x_SA, w, "activation", "in")
        for block in self.kernels.blocks(self.offsets_e, x_SA.shape[0]) if w.biases else ():
            y_SB[block.rows] += self.kernels.expand(take(w.biases, w.stacked, block.experts), block)
        return y_SB

    def dgrad(self, dy_SB: Tensor, w: GroupWeights) -> Tensor:
        return self._product(dy_SB, w, "gradient", "out")

    def keep(self, rows_SC: Tensor, role: Role) -> Kept:
        return self.engine.columns(self.call, rows_SC, self.offsets_e, role)

    def wgrad(self, x: Kept, dy: Kept, into: Gradients) -> None:
        dw_eAB = self.engine.wgrad((x[0], x[1]), (dy[0], dy[1]), self.offsets_e)
        with into.block(slice(0, dw_eAB.shape[0])) as (out_eBA, add):
            put(out_eBA, dw_eAB.transpose(1, 2), add)

    def _product(self, rows_SC: Tensor, w: GroupWeights, role: Role, along: Literal["in", "out"]) -> Tensor:
        w_eAB = w.by_row(w.groups)
        return self.engine.product(self.call, rows_SC, w_eAB, self.offsets_e, role, along).to(w.dtype)


@dataclass(frozen=True)
class Lowered:
    """A recipe at work in one module. engine: its hardware, or None where it is emulated."""

    recipe: Recipe
    engine: Engine | None

    @property
    def way(self) -> Way:
        return "emulated" if self.engine is None else "hardware"

    @property
    def alignment(self) -> int:
        """Rows per segment must be multiples of this."""
        return self.recipe.alignment if self.engine is None else self.engine.alignment

    def products(self, kernels: Kernels, offsets_e: Tensor, state: RecipeState | None) -> Products:
        """For one call; made inside a backward, for a forward that is computed again."""
        assert state is not None
        call = state.call()
        if self.engine is None:
            return Plain(kernels, offsets_e, call)
        return Hardware(kernels, offsets_e, call, self.engine)


def lower(recipe: Recipe, device: torch.device, widths: Sequence[tuple[int, int]]) -> Lowered:
    """How `recipe` multiplies weights of these (in, out) features on `device`: all of them the same way.

    Raises:
        BackendError: it cannot, see `Recipe.check`.
    """
    ways = {recipe.check(device, *width) for width in widths}
    return Lowered(recipe, recipe.engine() if ways == {"hardware"} else None)


def bias_gradients(kernels: Kernels, offsets_e: Tensor, dy_SB: Tensor, into: Gradients) -> None:
    """The sum of each segment's rows."""
    dtype = kernels.compute_dtype(dy_SB.dtype)
    for block in kernels.blocks(offsets_e, dy_SB.shape[0]):
        with into.block(block.experts) as (out, _):
            out.copy_(kernels.grouped_sum(dy_SB[block.rows].to(dtype), block).view_as(out))
