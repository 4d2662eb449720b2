"""The three products of one grouped weight in one call: as they are, emulated in low precision, or on its hardware.

    forward   y[segment i]  = x[segment i] w[i] + b[i]          zero behind the last segment
    dgrad     dx[segment i] = dy[segment i] w[i]^T              zero behind the last segment
    wgrad     dw[i] = x[segment i]^T dy[segment i]              of operands that `keep` made earlier

Legend: S rows in segments, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.grouped_linear import by_row, grouped_linear_op, weight_gradient_op
from trimtab.experts.library import name_of
from trimtab.experts.recipes.base import Engine, Operands, Recipe, RecipeState, Role, Way
from trimtab.kernels.api import Backend, put

Kept = tuple[Tensor, ...]


@dataclass(frozen=True)
class GroupWeights:
    """A grouped weight: [e, B, A] or e of [B, A]. Its bias: [e, B], e of [B], or none."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    stacked: bool

    @property
    def groups(self) -> slice:
        return slice(0, self.weights[0].shape[0] if self.stacked else len(self.weights))

    def by_row(self, e: slice) -> Tensor:
        """[e, A, B]."""
        return by_row(self.weights, e, self.stacked, False)

    def bias(self) -> Tensor | None:
        """[e, B]."""
        if not self.biases:
            return None
        return self.biases[0] if self.stacked else torch.stack(self.biases)


class Products:
    """For one call of one weight.

    Args:
        kernels: what multiplies, adds biases and writes weight gradients; or their names, see `library.kernels_for`.
        offsets_e: [e + 1] of the rows.
        call: what a recipe makes of the operands; None to take them as they are.
        engine: the recipe's own kernels; None to emulate it.
    """

    def __init__(
        self, kernels: Backend | str, offsets_e: Tensor, call: Operands | None = None, engine: Engine | None = None
    ) -> None:
        self.kernels, self.offsets_e, self.call, self.engine = kernels, offsets_e, call, engine
        self.name = kernels if isinstance(kernels, str) else name_of(kernels)

    def forward(self, x_SA: Tensor, w: GroupWeights) -> Tensor:
        """[S, B] in x's dtype, which is the weight's."""
        if self.call is None:
            return self._multiply(x_SA, w.weights, w.biases, w.stacked, transposed=False)
        w_eAB, bias_eB = w.by_row(w.groups), w.bias()
        if self.engine is None:
            x_quantized, w_quantized = self.call.activation(x_SA, self.offsets_e, "row"), self.call.weight(w_eAB, "in")
            biases = () if bias_eB is None else (bias_eB.float(),)
            return self._multiply(x_quantized, (w_quantized,), biases, True, transposed=True).to(x_SA.dtype)
        y = self.engine.product(self.call, x_SA, w_eAB, self.offsets_e, "activation", "in").to(x_SA.dtype)
        return y if bias_eB is None else y + expanded(bias_eB, self.offsets_e, y.shape[0])

    def dgrad(self, dy_SB: Tensor, w: GroupWeights) -> Tensor:
        """[S, A] in dy's dtype, which is the weight's."""
        if self.call is None:
            return self._multiply(dy_SB, w.weights, (), w.stacked, transposed=True)
        w_eAB = w.by_row(w.groups)
        if self.engine is None:
            dy_quantized, w_quantized = self.call.gradient(dy_SB, self.offsets_e, "row"), self.call.weight(w_eAB, "out")
            return self._multiply(dy_quantized, (w_quantized,), (), True, transposed=False).to(dy_SB.dtype)
        return self.engine.product(self.call, dy_SB, w_eAB, self.offsets_e, "gradient", "out").to(dy_SB.dtype)

    def keep(self, rows_SC: Tensor, role: Role) -> Kept:
        """An operand of `wgrad`."""
        if self.call is None:
            return (rows_SC,)
        if self.engine is not None:
            return self.engine.columns(self.call, rows_SC, self.offsets_e, role)
        make = self.call.activation if role == "activation" else self.call.gradient
        return (make(rows_SC, self.offsets_e, "column"),)

    def wgrad(self, x: Kept, dy: Kept, out: Sequence[Tensor], adds: Sequence[bool], stacked: bool) -> None:
        """Into `out`, one [e, B, A] or e of [B, A]: over what it holds or, where `adds` says so, onto it."""
        if self.engine is None:
            weight_gradient_op(out, adds, x[0], dy[0], self.offsets_e, stacked, False, self.name)
            return
        dw_eBA = self.engine.wgrad((x[0], x[1]), (dy[0], dy[1]), self.offsets_e).transpose(1, 2)
        for target, value, add in zip(out, [dw_eBA] if stacked else dw_eBA.unbind(), adds, strict=True):
            put(target, value, add)

    def _multiply(
        self, rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], stacked: bool, *, transposed: bool
    ) -> Tensor:
        y: Tensor = grouped_linear_op(rows, weights, biases, self.offsets_e, stacked, transposed, self.name)
        return y


def expanded(values_eB: Tensor, offsets_e: Tensor, rows: int) -> Tensor:
    """Each group's row of values for each of its rows, zero behind the last segment: [rows, B]."""
    group_S = torch.searchsorted(offsets_e[1:], torch.arange(rows, device=values_eB.device), right=True)
    return torch.cat((values_eB, values_eB.new_zeros(1, values_eB.shape[1]))).index_select(0, group_S)


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

    def products(self, kernels: Backend | str, offsets_e: Tensor, state: RecipeState | None) -> Products:
        """For one call; made inside a backward, for a forward that is computed again."""
        assert state is not None
        return Products(kernels, offsets_e, state.call(), self.engine)


def lower(recipe: Recipe, device: torch.device, widths: Sequence[tuple[int, int]]) -> Lowered:
    """How `recipe` multiplies weights of these (in, out) features on `device`: all of them the same way.

    Raises:
        BackendError: it cannot, see `Recipe.check`.
    """
    ways = {recipe.check(device, *width) for width in widths}
    return Lowered(recipe, recipe.engine() if ways == {"hardware"} else None)
