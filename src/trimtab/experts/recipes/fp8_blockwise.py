"""FP8 in blocks: 1 x 128 along the contracted axis for activations and gradients, 128 x 128 for weights.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.2): E4M3 for everything, since each block has a scale of its own. Scales in
float32, or rounded down to powers of two so that the same bytes can be scaled again in the other direction without
loss (ibid., and TransformerEngine's default).

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.recipes.base import RecipeState, RowsAlong, WeightAlong
from trimtab.experts.recipes.blocks import Segments, block_amax
from trimtab.experts.recipes.common import RecipeBase
from trimtab.experts.recipes.describe import ErrorBound, Formats, Stored, product_bound, rms_error
from trimtab.experts.recipes.formats import E4M3
from trimtab.experts.recipes.fp8_current import float_scaled
from trimtab.experts.recipes.machine import Hardware
from trimtab.experts.recipes.quantised import Quantised, QuantisedState, RowsRole, by_block
from trimtab.experts.recipes.scales import float_scale

BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class FP8Blockwise(RecipeBase):
    """One float32 scale per 128 contracted values of an activation or gradient, per 128 x 128 of a weight.

    power_of_two: scales are powers of two. Then quantising twice changes nothing.
    """

    power_of_two: bool = True

    @property
    def name(self) -> str:
        return "fp8_blockwise"

    @property
    def alignment(self) -> int:
        return BLOCK  # wgrad's blocks lie along the rows

    def hardware(self) -> Hardware:
        return Hardware(
            kernel="torch.nn.functional.scaled_grouped_mm with 1x128 and 128x128 scales, or DeepGEMM",
            capabilities=((9, 0),),
            multiple=BLOCK,
        )

    def formats(self) -> Formats:
        rows = Stored(values=E4M3.dtype, scales=torch.float32, block=(1, BLOCK), bits=8 + 32 / BLOCK)
        weight = Stored(values=E4M3.dtype, scales=torch.float32, block=(BLOCK, BLOCK), bits=8 + 32 / BLOCK**2)
        return Formats(activation=rows, weight=weight, gradient=rows)

    def error_bound(self) -> ErrorBound:
        element = float_scaled(E4M3, headroom=2.0 if self.power_of_two else 1.0)
        product = product_bound(rms_error(E4M3.mantissa), rms_error(E4M3.mantissa))
        return ErrorBound(activation=element, weight=element, gradient=element, forward=product, backward=product)

    def emulation(self) -> RecipeState:
        return FP8BlockwiseState(self)


class FP8BlockwiseState(QuantisedState):
    """No buffers: the scales come from the data. Scales: rows [R, m] or [n, C], weights [e, n, m]."""

    def __init__(self, recipe: FP8Blockwise) -> None:
        super().__init__(recipe.alignment)
        self.exact = recipe.power_of_two

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        return self._blocks(x_RC, *((1, BLOCK) if along == "row" else (BLOCK, 1)))

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        return self._blocks(w_eAB, BLOCK, BLOCK)

    def _blocks(self, x: Tensor, rows: int, columns: int) -> Quantised:
        return by_block(x, rows, columns, E4M3, float_scale(block_amax(x, rows, columns), E4M3, exact=self.exact))
