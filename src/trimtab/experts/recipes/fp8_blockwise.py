"""FP8 in blocks: 1 x 128 along the contracted axis for activations and gradients, 128 x 128 for weights.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.2): E4M3 for everything, since each block has a scale of its own. Scales in
float32, or rounded down to powers of two so that the same bytes can be scaled again in the other direction without
loss (ibid., and TransformerEngine's default).

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trimtab.experts.recipes.base import RecipeState, RowsAlong, RowsRole, WeightAlong
from trimtab.experts.recipes.blocks import Segments, block_amax
from trimtab.experts.recipes.blockwise_kernel import BlockwiseKernel
from trimtab.experts.recipes.describe import Formats, Stored
from trimtab.experts.recipes.e4m3 import E4M3Scaled, E4M3ScaledState
from trimtab.experts.recipes.engine import Engine
from trimtab.experts.recipes.formats import E4M3
from trimtab.experts.recipes.machine import Hardware
from trimtab.experts.recipes.quantised import Quantised, by_block

BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class FP8Blockwise(E4M3Scaled):
    """One float32 scale per 128 contracted values of an activation or gradient, per 128 x 128 of a weight.

    power_of_two: scales are powers of two. Then quantising twice changes nothing.
    """

    power_of_two: bool = True

    name: ClassVar[str] = "fp8_blockwise"
    alignment: ClassVar[int] = BLOCK  # wgrad's blocks lie along the rows

    def hardware(self) -> Hardware:
        return Hardware(
            kernel="trimtab.kernels.fp8_blockwise (Triton)",
            capabilities=((9, 0),),
            multiple=BLOCK,
            called=True,
            modules=("triton",),
        )

    def formats(self) -> Formats:
        rows = Stored(values=E4M3.dtype, scales=torch.float32, block=(1, BLOCK), bits=8 + 32 / BLOCK)
        weight = Stored(values=E4M3.dtype, scales=torch.float32, block=(BLOCK, BLOCK), bits=8 + 32 / BLOCK**2)
        return Formats(activation=rows, weight=weight, gradient=rows)

    def state(self) -> RecipeState:
        return FP8BlockwiseState(self)

    def engine(self) -> Engine:
        return Engine(BlockwiseKernel())


class FP8BlockwiseState(E4M3ScaledState):
    """No buffers: the scales come from the data. Scales: rows [R, m] or [n, C], weights [e, n, m]."""

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        return self._blocks(x_RC, *((1, BLOCK) if along == "row" else (BLOCK, 1)))

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        return self._blocks(w_eAB, BLOCK, BLOCK)

    def _blocks(self, x: Tensor, rows: int, columns: int) -> Quantised:
        return by_block(x, rows, columns, E4M3, self.scale(block_amax(x, rows, columns)))
