"""What the recipes share that store every operand in E4M3 with float32 scales taken from the data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trimtab.experts.recipes.base import Recipe, RecipeState
from trimtab.experts.recipes.describe import ErrorBound, product_bound, rms_error
from trimtab.experts.recipes.formats import E4M3
from trimtab.experts.recipes.fp8_current import float_scaled
from trimtab.experts.recipes.scales import Scale, float_scale


@dataclass(frozen=True, kw_only=True)
class E4M3Scaled(Recipe):
    """power_of_two: scales are rounded down to powers of two, so that scaling itself loses nothing."""

    power_of_two: bool

    def error_bound(self) -> ErrorBound:
        element = float_scaled(E4M3, headroom=2.0 if self.power_of_two else 1.0)
        product = product_bound(rms_error(E4M3.mantissa), rms_error(E4M3.mantissa))
        return ErrorBound(activation=element, weight=element, gradient=element, forward=product, backward=product)


class E4M3ScaledState(RecipeState):
    """No buffers: the scales come from the data."""

    def __init__(self, recipe: E4M3Scaled) -> None:
        super().__init__(recipe.alignment)
        self.exact = recipe.power_of_two

    def scale(self, amax: Tensor) -> Scale:
        """Of blocks with these magnitudes."""
        return float_scale(amax, E4M3, exact=self.exact)
