"""NVFP4: E2M1 values in blocks of 16 along the contracted axis, E4M3 block scales, one float32 scale per tensor.

    g = amax(tensor) / (6 * 448)        block scale = E4M3(amax(block) / 6 / g)        x ~ value * block scale * g

after "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), with its stochastic rounding of gradients and
its 16 x 16 weight blocks, which make the weights of the forward and of the backward the same numbers. A grouped
layer's tensors are its segments and its experts' matrices: g is per expert. The paper's random Hadamard transform of
wgrad's operands is not part of this recipe.

Legend: R expert rows, e experts, A in features, B out features, C either width, n and m blocks of rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from trimtab.experts.recipes.base import Recipe, RecipeState, RowsAlong, RowsRole, WeightAlong
from trimtab.experts.recipes.blocks import Segments, block_amax, spread_blocks
from trimtab.experts.recipes.describe import ElementBound, ErrorBound, Formats, Stored, product_bound
from trimtab.experts.recipes.formats import E2M1, E4M3, encode
from trimtab.experts.recipes.machine import Hardware
from trimtab.experts.recipes.noise import Noise
from trimtab.experts.recipes.quantised import Quantised, whole_amax
from trimtab.experts.recipes.scales import e4m3_scale, tensor_scale

BLOCK = 16

# Root mean square relative errors of standard normal values, from the steps 1/2, 1, 2 of E2M1 and the expected amax
# of a block: 1.77 standard deviations of 16 values, 2.8 of 256. Rounding to nearest; stochastically, sqrt(2) of it.
RMS_LINE, RMS_SQUARE = 0.10, 0.115


@dataclass(frozen=True, kw_only=True)
class NVFP4(Recipe):
    """One E4M3 scale per 16 contracted values, one float32 scale per expert and operand.

    square_weights: one scale per 16 x 16 values of a weight, the same for both products.
    stochastic_gradients: gradients are rounded stochastically, without bias.
    seed: the key of that noise; None takes one from torch's default generator when a state is made.
    """

    square_weights: bool = True
    stochastic_gradients: bool = True
    seed: int | None = None

    name: ClassVar[str] = "nvfp4"
    alignment: ClassVar[int] = 32  # 16 bytes of the contracted axis, two values to a byte; a multiple of BLOCK

    def hardware(self) -> Hardware:
        return Hardware(
            kernel="torch.nn.functional.scaled_grouped_mm with 1x16 E4M3 scales",
            capabilities=((10, 0),),
            multiple=32,
        )

    def formats(self) -> Formats:
        line, square = 4 + 8 / BLOCK, 4 + 8 / BLOCK**2
        rows = Stored(values=E2M1.dtype, scales=E4M3.dtype, block=(1, BLOCK), bits=line)
        weight = Stored(values=E2M1.dtype, scales=E4M3.dtype, block=(BLOCK, 1), bits=line)
        if self.square_weights:
            weight = Stored(values=E2M1.dtype, scales=E4M3.dtype, block=(BLOCK, BLOCK), bits=square)
        return Formats(activation=rows, weight=weight, gradient=rows)

    def _element(self, stochastic: bool) -> ElementBound:
        # The block scale is off by E4M3's u / (1 + u), and below its normal range by half its smallest value; all of
        # amax may be lost to that. A stochastic value is off by less than a step: the whole of it, not half.
        wrong = 1 + E4M3.relative_error
        steps = 2 if stochastic else 1
        return ElementBound(
            relative=0.5 if stochastic else E2M1.relative_error,
            block_floor=E2M1.step / 2 * steps / E2M1.largest * wrong,
            tensor_floor=E4M3.step / 2 / E4M3.largest,
        )

    def error_bound(self) -> ErrorBound:
        nearest, weight = self._element(False), RMS_SQUARE if self.square_weights else RMS_LINE
        gradient = RMS_LINE * 2**0.5 if self.stochastic_gradients else RMS_LINE
        return ErrorBound(
            activation=nearest,
            weight=nearest,
            gradient=self._element(self.stochastic_gradients),
            forward=product_bound(RMS_LINE, weight),
            backward=product_bound(gradient, weight),
        )

    def state(self) -> RecipeState:
        return NVFP4State(self)


class NVFP4State(RecipeState):
    """Holds the noise. Block scales: rows [R, m] or [n, C], weights [e, n, m], on the E4M3 grid, without g."""

    def __init__(self, recipe: NVFP4) -> None:
        super().__init__(recipe.alignment)
        self.square_weights = recipe.square_weights
        self.noise = Noise(recipe.seed) if recipe.stochastic_gradients else None

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        rows, columns = (1, BLOCK) if along == "row" else (BLOCK, 1)
        g_e1 = tensor_scale(segments.amax(x_RC))
        g_n1 = g_e1.index_select(0, segments.owner(rows))
        noise = self.noise(x_RC) if self.noise is not None and role == "gradient" else None
        return _blocks(x_RC, rows, columns, g_n1, noise)

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        rows, columns = (BLOCK, 1) if along == "in" else (1, BLOCK)
        if self.square_weights:
            rows = columns = BLOCK
        return _blocks(w_eAB, rows, columns, tensor_scale(whole_amax(w_eAB)), None)


def _blocks(x: Tensor, rows: int, columns: int, g: Tensor, noise: Tensor | None) -> Quantised:
    stored, scale = e4m3_scale(block_amax(x, rows, columns), g)
    encoder, factor = (spread_blocks(s, rows, columns, x) for s in (scale.encode, scale.decode))
    return Quantised(encode(x, encoder, E2M1, noise), stored, factor)
