"""FP8 with delayed scaling: the scale comes from the magnitudes of earlier steps, one per expert and operand.

"FP8 Formats for Deep Learning" (arXiv 2209.05433) and TransformerEngine's DelayedScaling: E4M3 forward, E5M2 for
gradients; what has grown beyond the history and the margin saturates. How the history moves: `amax_history.py`.

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.experts.recipes.amax_history import AmaxHistory
from trimtab.experts.recipes.base import Operands, RecipeState, RowsAlong, RowsRole, WeightAlong
from trimtab.experts.recipes.blocks import Segments
from trimtab.experts.recipes.describe import ElementBound, ErrorBound
from trimtab.experts.recipes.formats import E4M3, ElementFormat
from trimtab.experts.recipes.fp8_current import FP8Current, float_scaled, gradient_format
from trimtab.experts.recipes.quantised import Quantised, by_broadcast, by_segment, whole_amax
from trimtab.experts.recipes.scales import Scale
from trimtab.routing.recompute import in_backward
from trimtab.validation import is_whole

LARGEST_MARGIN = 11
"""With more, too many values are subnormal in E4M3 for the stated error of a product. With amax at 7 standard
deviations of normal values, the root mean square error of an element grows by 7 % at a margin of 11, by 45 % at 12, to
2.7 times at 13. A product of 1,024 contracted values, amax at 6.5, went beyond its bound at 12; at 13 it did with
amax of its own operands."""


@dataclass(frozen=True, kw_only=True)
class FP8Delayed(FP8Current):
    """As FP8Current, with scales from the past.

    history: steps remembered. margin: powers of two of headroom above the largest of them, at most `LARGEST_MARGIN`.
    algorithm: the "max" of the history, or the "latest" step.
    """

    history: int = 1024
    margin: int = 0
    algorithm: Literal["max", "latest"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = is_whole(self.history) and is_whole(self.margin)
        fits = whole and self.history >= 1 and 0 <= self.margin <= LARGEST_MARGIN
        if not fits or self.algorithm not in ("max", "latest"):
            raise ConfigError(
                f"history {self.history}, margin {self.margin}, algorithm {self.algorithm!r}: need history >= 1, "
                f"margin from 0 to {LARGEST_MARGIN}, and 'max' or 'latest'"
            )

    name: ClassVar[str] = "fp8_delayed"

    def error_bound(self) -> ErrorBound:
        """As long as magnitudes stay within a factor of 2 ** margin of the history; beyond, values saturate.

        block_floor is of the magnitude that gave the scale.
        """
        bound, wide = super().error_bound(), 2.0**self.margin

        def element(form: ElementFormat) -> ElementBound:
            return float_scaled(form, headroom=wide)

        forward, gradient = element(E4M3), element(gradient_format(self.hybrid))
        return replace(bound, activation=forward, weight=forward, gradient=gradient)

    def state(self) -> RecipeState:
        return FP8DelayedState(self)


class FP8DelayedState(RecipeState):
    """Three histories: activation, weight, gradient."""

    def __init__(self, recipe: FP8Delayed) -> None:
        super().__init__(recipe.alignment)

        def history(form: ElementFormat, **options: int) -> AmaxHistory:
            return AmaxHistory(recipe.history, form, recipe.margin, recipe.algorithm, **options)

        self.activation_amax = history(E4M3)
        self.weight_amax = history(E4M3)
        self.gradient_amax = history(gradient_format(recipe.hybrid), remembered=0)

    def reserve(self, num_groups: int) -> None:
        for history in (self.activation_amax, self.weight_amax, self.gradient_amax):
            history.reserve(num_groups)

    def call(self) -> Operands:
        return FP8DelayedCall(self)

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        return self.call().rows(x_RC, segments, along, role)

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        return self.call().stacked(w_eAB, along)


class FP8DelayedCall(Operands):
    """One step of each history. Inside a backward, activation and weight are those of a call that has been."""

    def __init__(self, state: FP8DelayedState) -> None:
        self.alignment, self.state = state.alignment, state
        self.recomputed = in_backward()
        self.held: dict[AmaxHistory, tuple[Tensor, Tensor]] = {}  # the first magnitudes, and what gives the scale
        self.which: Tensor | None = None  # call that is computed again

    def rows(self, x_RC: Tensor, segments: Segments, along: RowsAlong, role: RowsRole) -> Quantised:
        history = self.state.activation_amax if role == "activation" else self.state.gradient_amax
        scale = self._scale(history, segments.amax(x_RC)[:, 0])
        return by_segment(x_RC, segments, history.form, scale.view(-1, 1))

    def stacked(self, w_eAB: Tensor, along: WeightAlong) -> Quantised:
        scale = self._scale(self.state.weight_amax, whole_amax(w_eAB)[:, 0, 0])
        return by_broadcast(w_eAB, E4M3, scale.view(-1, 1, 1))

    def _scale(self, history: AmaxHistory, amax_e: Tensor) -> Scale:
        if history in self.held:
            first_e, basis_e = self.held[history]
            history.also(amax_e.where(amax_e > first_e, 0))  # of a recomputed step the rest is told already
            return history.scale(basis_e)
        if self.recomputed and history is not self.state.gradient_amax:
            if self.which is None:  # activations come first
                self.which = history.which(amax_e)
            basis_e = history.again(amax_e, self.which)
        else:
            basis_e = history.step(amax_e)
        self.held[history] = amax_e, basis_e
        return history.scale(basis_e)
