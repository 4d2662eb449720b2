"""FP8 with current scaling, one scale per vector that is contracted: per token, per output feature.

    forward   x: per row              w: per (expert, out feature)
    dgrad     dy: per row             w: per (expert, in feature)
    wgrad     x, dy: per (expert, feature), over the expert's rows

All in E4M3, as torch.nn.functional.scaled_grouped_mm takes it on Hopper: `rowwise_kernel.py`.

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trimtab.experts.recipes.base import RecipeState, RowsAlong, RowsRole, WeightAlong
from trimtab.experts.recipes.blocks import Segments, block_amax
from trimtab.experts.recipes.describe import Formats, Stored
from trimtab.experts.recipes.e4m3 import E4M3Scaled, E4M3ScaledState
from trimtab.experts.recipes.engine import Engine
from trimtab.experts.recipes.formats import E4M3
from trimtab.experts.recipes.machine import Hardware
from trimtab.experts.recipes.quantised import Quantised, by_broadcast, by_segment
from trimtab.experts.recipes.rowwise_kernel import RowwiseKernel


@dataclass(frozen=True, kw_only=True)
class FP8Rowwise(E4M3Scaled):
    """One float32 scale per contracted vector.

    power_of_two: scales are powers of two, so that scaling itself loses nothing.
    """

    power_of_two: bool = False

    name: ClassVar[str] = "fp8_rowwise"
    alignment: ClassVar[int] = 16  # bytes, of the contracted axis of an FP8 operand: wgrad contracts the rows

    def hardware(self) -> Hardware:
        return Hardware(
            kernel="torch.nn.functional.scaled_grouped_mm with row-wise scales",
            capabilities=((9, 0),),
            multiple=16,
            called=True,
            functions=("scaled_grouped_mm",),
        )

    def formats(self) -> Formats:
        rows = Stored(values=E4M3.dtype, scales=torch.float32, block=(1, 0), bits=8.0)
        weight = Stored(values=E4M3.dtype, scales=torch.float32, block=(0, 1), bits=8.0)
        return Formats(activation=rows, weight=weight, gradient=rows)

    def state(self) -> RecipeState:
        return FP8RowwiseState(self)

    def engine(self) -> Engine:
        return Engine(RowwiseKernel())


class FP8RowwiseState(E4M3ScaledState):
    """No buffers: the scales come from the data. Scales: rows [R, 1] or [e, C], weights [e, 1, B] or [e, A, 1]."""

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        if along == "row":
            amax_R1 = block_amax(x_RC, 1, x_RC.shape[1])
            return by_broadcast(x_RC, E4M3, self.scale(amax_R1))
        amax_eC = segments.column_amax(x_RC)
        return by_segment(x_RC, segments, E4M3, self.scale(amax_eC))

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        rows, columns = (w_eAB.shape[1], 1) if along == "in" else (1, w_eAB.shape[2])
        amax = block_amax(w_eAB, rows, columns)
        return by_broadcast(w_eAB, E4M3, self.scale(amax))
