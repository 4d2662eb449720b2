"""FP8 with current scaling, one scale per vector that is contracted: per token, per output feature.

    forward   x: per row              w: per (expert, out feature)
    dgrad     dy: per row             w: per (expert, in feature)
    wgrad     x, dy: per (expert, feature), over the expert's rows

All in E4M3, as torch.nn.functional.scaled_grouped_mm takes it on Hopper. Real products: `hardware.py`.

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
from trimtab.experts.recipes.quantised import Quantised, QuantisedState, RowsRole, by_broadcast, by_segment
from trimtab.experts.recipes.scales import float_scale


@dataclass(frozen=True, kw_only=True)
class FP8Rowwise(RecipeBase):
    """One float32 scale per contracted vector.

    power_of_two: scales are powers of two, so that scaling itself loses nothing.
    """

    power_of_two: bool = False

    @property
    def name(self) -> str:
        return "fp8_rowwise"

    @property
    def alignment(self) -> int:
        return 16  # bytes to which the contracted axis of an FP8 operand is aligned: wgrad contracts the rows

    def hardware(self) -> Hardware:
        return Hardware(
            kernel="torch.nn.functional.scaled_grouped_mm with row-wise scales",
            capabilities=((9, 0),),
            multiple=16,
            called=True,
        )

    def formats(self) -> Formats:
        rows = Stored(values=E4M3.dtype, scales=torch.float32, block=(1, 0), bits=8.0)
        weight = Stored(values=E4M3.dtype, scales=torch.float32, block=(0, 1), bits=8.0)
        return Formats(activation=rows, weight=weight, gradient=rows)

    def error_bound(self) -> ErrorBound:
        element = float_scaled(E4M3, headroom=2.0 if self.power_of_two else 1.0)
        product = product_bound(rms_error(E4M3.mantissa), rms_error(E4M3.mantissa))
        return ErrorBound(activation=element, weight=element, gradient=element, forward=product, backward=product)

    def emulation(self) -> RecipeState:
        return FP8RowwiseState(self)


class FP8RowwiseState(QuantisedState):
    """No buffers: the scales come from the data. Scales: rows [R, 1] or [e, C], weights [e, 1, B] or [e, A, 1]."""

    def __init__(self, recipe: FP8Rowwise) -> None:
        super().__init__(recipe.alignment)
        self.exact = recipe.power_of_two

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        if along == "row":
            amax_R1 = block_amax(x_RC, 1, x_RC.shape[1])
            return by_broadcast(x_RC, E4M3, float_scale(amax_R1, E4M3, exact=self.exact))
        amax_eC = segments.column_amax(x_RC)
        return by_segment(x_RC, segments, E4M3, float_scale(amax_eC, E4M3, exact=self.exact))

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        rows, columns = (w_eAB.shape[1], 1) if along == "in" else (1, w_eAB.shape[2])
        amax = block_amax(w_eAB, rows, columns)
        return by_broadcast(w_eAB, E4M3, float_scale(amax, E4M3, exact=self.exact))
