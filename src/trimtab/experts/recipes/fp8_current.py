"""FP8 with current scaling, one scale per expert: from the largest magnitude that is there now.

A grouped layer's tensors are its segments and its experts' matrices: each has a scale of its own, so that one
expert's tokens never change another's numbers. E4M3 forward, E5M2 for gradients (arXiv 2209.05433, "hybrid"), or
E4M3 for both.

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trimtab.experts.recipes.base import Recipe, RecipeState, RowsAlong, RowsRole, WeightAlong
from trimtab.experts.recipes.blocks import Segments
from trimtab.experts.recipes.describe import ElementBound, ErrorBound, Formats, Stored, product_bound, rms_error
from trimtab.experts.recipes.formats import E4M3, E5M2, ElementFormat
from trimtab.experts.recipes.machine import Hardware
from trimtab.experts.recipes.quantised import Quantised, by_broadcast, by_segment, whole_amax
from trimtab.experts.recipes.scales import float_scale

# Scales in float32 are off by at most this, and so are the products with them.
SCALE_ERROR = 2.0**-21


def float_scaled(form: ElementFormat, *, headroom: float = 1.0) -> ElementBound:
    """The bound of a format whose scale puts amax at `largest`, or as far below as a factor of `headroom`."""
    return ElementBound(
        relative=form.relative_error + SCALE_ERROR,
        block_floor=form.step / 2 / form.largest * headroom * (1 + SCALE_ERROR),
    )


def gradient_format(hybrid: bool) -> ElementFormat:
    """E5M2, for its range, or E4M3 as in the forward."""
    return E5M2 if hybrid else E4M3


@dataclass(frozen=True, kw_only=True)
class FP8Current(Recipe):
    """One float32 scale per expert and operand, taken from the data.

    hybrid: gradients in E5M2 rather than E4M3.
    """

    hybrid: bool = True

    name: ClassVar[str] = "fp8_current"
    alignment: ClassVar[int] = 16  # bytes, of the contracted axis of an FP8 operand: wgrad contracts the rows

    def hardware(self) -> Hardware:
        return Hardware(
            kernel="one FP8 GEMM per expert (torch.nn.functional.scaled_mm, tensor-wise scales)",
            capabilities=((8, 9), (9, 0), (10, 0)),
            multiple=16,
        )

    def formats(self) -> Formats:
        forward = Stored(values=E4M3.dtype, scales=torch.float32, block=(0, 0), bits=8.0)
        gradient = Stored(values=gradient_format(self.hybrid).dtype, scales=torch.float32, block=(0, 0), bits=8.0)
        return Formats(activation=forward, weight=forward, gradient=gradient)

    def error_bound(self) -> ErrorBound:
        forward, backward = float_scaled(E4M3), gradient_format(self.hybrid)
        return ErrorBound(
            activation=forward,
            weight=forward,
            gradient=float_scaled(backward),
            forward=product_bound(rms_error(E4M3.mantissa), rms_error(E4M3.mantissa)),
            backward=product_bound(rms_error(E4M3.mantissa), rms_error(backward.mantissa)),
        )

    def state(self) -> RecipeState:
        return FP8CurrentState(self)


class FP8CurrentState(RecipeState):
    """No buffers: the scales come from the data."""

    def __init__(self, recipe: FP8Current) -> None:
        super().__init__(recipe.alignment)
        self.form = {"activation": E4M3, "gradient": gradient_format(recipe.hybrid)}

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        form = self.form[role]
        return by_segment(x_RC, segments, form, float_scale(segments.amax(x_RC), form))

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        return by_broadcast(w_eAB, E4M3, float_scale(whole_amax(w_eAB), E4M3))
