"""MXFP8: blocks of 32 along the contracted axis, each with a power of two as its scale (OCP Microscaling v1.0).

The scale is 2 ** (floor(log2 amax) - emax), as section 6.3 of the specification has it; a value between the largest
of the format and 2 ** (emax + 1) saturates. Blackwell training stacks round the exponent up instead, so that nothing
saturates (arXiv 2506.08027): `scale_rounding="ceil"`. What then rounds up to 2 ** 128 is Inf in float32.

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.experts.recipes.base import Recipe, RecipeState, RowsAlong, RowsRole, WeightAlong
from trimtab.experts.recipes.blocks import Segments, block_amax
from trimtab.experts.recipes.describe import ElementBound, ErrorBound, Formats, Stored, product_bound, rms_error
from trimtab.experts.recipes.engine import Engine
from trimtab.experts.recipes.formats import E4M3, ElementFormat
from trimtab.experts.recipes.fp8_current import gradient_format
from trimtab.experts.recipes.machine import Hardware
from trimtab.experts.recipes.mxfp8_kernel import MXFP8Kernel
from trimtab.experts.recipes.quantised import Quantised, by_block
from trimtab.experts.recipes.scales import e8m0_scale

BLOCK = 32

# Root mean square relative error from saturation with "floor", standard normal values: amax = 2 ** k * f saturates for
# f in (1.75, 2), in log2(2 / 1.75) = 19 % of blocks, by a mean square of 0.0059 of its own, which is 14 % of a block's.
RMS_SATURATION = (0.19 * 0.0059 * 0.14) ** 0.5


@dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """One E8M0 scale per 32 contracted values of every operand.

    scale_rounding: "floor" as in the specification, "ceil" as in the training stacks.
    hybrid: gradients in E5M2 rather than E4M3.
    """

    scale_rounding: Literal["floor", "ceil"] = "floor"
    hybrid: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rounding not in ("floor", "ceil"):
            raise ConfigError(f"scale_rounding {self.scale_rounding!r}: choose 'floor' or 'ceil'")

    name: ClassVar[str] = "mxfp8"
    alignment: ClassVar[int] = BLOCK  # wgrad's blocks lie along the rows

    def hardware(self) -> Hardware:
        return Hardware(
            kernel="torch.nn.functional.scaled_grouped_mm with 1x32 E8M0 scales",
            capabilities=((10, 0),),
            multiple=BLOCK,
            called=not self.hybrid,  # the kernel takes E4M3 only
            functions=("scaled_grouped_mm",),
        )

    def formats(self) -> Formats:
        bits = 8 + 8 / BLOCK
        rows = Stored(values=E4M3.dtype, scales=torch.float8_e8m0fnu, block=(1, BLOCK), bits=bits)
        weight = Stored(values=E4M3.dtype, scales=torch.float8_e8m0fnu, block=(BLOCK, 1), bits=bits)
        gradient = Stored(
            values=gradient_format(self.hybrid).dtype, scales=torch.float8_e8m0fnu, block=(1, BLOCK), bits=bits
        )
        return Formats(activation=rows, weight=weight, gradient=gradient)

    def _element(self, form: ElementFormat) -> ElementBound:
        if self.scale_rounding == "ceil":  # amax lands in (largest / 2, largest]
            return ElementBound(relative=form.relative_error, block_floor=form.step / form.largest)
        top = 2.0 ** math.frexp(form.largest)[1]  # amax lands in [top / 2, top), and above `largest` it saturates
        return ElementBound(relative=max(form.relative_error, 1 - form.largest / top), block_floor=form.step / top)

    def _rms(self, form: ElementFormat) -> float:
        saturation = RMS_SATURATION if self.scale_rounding == "floor" else 0.0
        return math.hypot(rms_error(form.mantissa), saturation)

    def error_bound(self) -> ErrorBound:
        backward = gradient_format(self.hybrid)
        return ErrorBound(
            activation=self._element(E4M3),
            weight=self._element(E4M3),
            gradient=self._element(backward),
            forward=product_bound(self._rms(E4M3), self._rms(E4M3)),
            backward=product_bound(self._rms(E4M3), self._rms(backward)),
        )

    def state(self) -> RecipeState:
        return MXFP8State(self)

    def engine(self) -> Engine | None:
        return None if self.hybrid else Engine(MXFP8Kernel())


class MXFP8State(RecipeState):
    """No buffers: the scales come from the data. Scales: rows [R, m] or [n, C], weights [e, n, B] or [e, A, m]."""

    def __init__(self, recipe: MXFP8) -> None:
        super().__init__(recipe.alignment)
        self.ceil = recipe.scale_rounding == "ceil"
        self.form = {"activation": E4M3, "gradient": gradient_format(recipe.hybrid)}

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        return self._blocks(x_RC, *((1, BLOCK) if along == "row" else (BLOCK, 1)), self.form[role])

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        return self._blocks(w_eAB, *((BLOCK, 1) if along == "in" else (1, BLOCK)), E4M3)

    def _blocks(self, x: Tensor, rows: int, columns: int, form: ElementFormat) -> Quantised:
        return by_block(x, rows, columns, form, e8m0_scale(block_amax(x, rows, columns), form, ceil=self.ceil))
