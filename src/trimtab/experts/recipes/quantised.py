"""A quantised tensor, and the operands from which all recipes derive: pad out, quantise, multiply the scales back.

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.experts.recipes.base import Operands, RecipeState, RowsAlong, RowsRole, WeightAlong
from trimtab.experts.recipes.blocks import Segments, block_amax, spread_blocks
from trimtab.experts.recipes.formats import ElementFormat, encode
from trimtab.experts.recipes.scales import Scale


@dataclass(frozen=True)
class Quantised:
    """values: float32 on the element format's grid. scale: as stored, compact. factor: it, broadcastable to values.

    `values.to(format.dtype)` is exact: those are the bytes the hardware reads.
    """

    values: Tensor
    scale: Tensor
    factor: Tensor

    def dequantised(self) -> Tensor:
        """values * factor, rounded once to float32."""
        return self.values * self.factor


class Quantiser(Operands):
    """Implements the three methods on `rows` and `stacked`, which a recipe defines. alignment: the recipe's."""

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
        return self.quantise_rows(x_RA, offsets_e, along, "activation").dequantised()

    def weight(self, w_eAB: Tensor, along: WeightAlong) -> Tensor:
        return self.quantise_weight(w_eAB, along).dequantised()

    def gradient(self, dy_RB: Tensor, offsets_e: Tensor, along: RowsAlong) -> Tensor:
        return self.quantise_rows(dy_RB, offsets_e, along, "gradient").dequantised()


class QuantisedState(Quantiser, RecipeState):
    """A state that quantises.

    Args:
        alignment: the recipe's.
    """

    def __init__(self, alignment: int) -> None:
        super().__init__()
        self.alignment = alignment

    def call(self) -> Quantiser:
        return self


def by_block(x: Tensor, rows: int, columns: int, form: ElementFormat, scale: Scale) -> Quantised:
    """x [..., R, C] with one scale [..., n, m] per block of `rows` x `columns`."""
    factor = spread_blocks(scale.decode, rows, columns, x)
    return Quantised(encode(x, spread_blocks(scale.encode, rows, columns, x), form), scale.decode, factor)


def by_segment(x_RC: Tensor, segments: Segments, form: ElementFormat, scale: Scale) -> Quantised:
    """x [R, C] with scales per segment: [e, 1] or [e, C]."""
    factor = segments.spread(scale.decode)
    return Quantised(encode(x_RC, segments.spread(scale.encode), form), scale.decode, factor)


def by_broadcast(x: Tensor, form: ElementFormat, scale: Scale) -> Quantised:
    """x with scales that broadcast to it."""
    return Quantised(encode(x, scale.encode, form), scale.decode, scale.decode)


def whole_amax(w_eAB: Tensor) -> Tensor:
    """Largest finite magnitude of each expert's matrix: [e, 1, 1]."""
    return block_amax(w_eAB, w_eAB.shape[1], w_eAB.shape[2])


def _one_of(along: str, allowed: tuple[str, str]) -> None:
    if along not in allowed:
        raise InputError(f"along={along!r}: choose one of {allowed}")
