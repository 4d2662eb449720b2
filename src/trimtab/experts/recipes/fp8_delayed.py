"""FP8 with delayed scaling: the scale comes from the largest magnitudes of earlier steps, one per expert and operand.

"FP8 Formats for Deep Learning" (arXiv 2209.05433) and TransformerEngine's DelayedScaling. A step is one call of a
layer, forward and backward. Its first product of an operand takes the scale from the history, moves it on by one and
writes this step's magnitude; other products of that call use the same scale. An expert whose history is all zeros
takes its scale from the data. In eval mode the history does not move.

A forward that is computed again moves nothing. It finds its scales by the activations' magnitudes, which are to the bit
those of one of the last `REMEMBERED` calls, in its own mode first: calls on the same data have other scales in the
other. An older one takes what a new call in eval mode would.

Legend: H steps of history, e experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from trimtab.autograd import in_backward
from trimtab.errors import ConfigError, InputError
from trimtab.experts.recipes.base import Operands, RecipeState, Role, StateBuffers
from trimtab.experts.recipes.fp8 import FP8Current
from trimtab.experts.recipes.numbers import Blocks, ElementFormat, Scale, float_scale
from trimtab.validation import is_whole

LARGEST_MARGIN = 11
"""With more, too many values are subnormal in E4M3 for the stated error of a product, see docs/recipes.md."""

REMEMBERED = 256
"""A pipeline has as many calls in flight as it has stages, or micro-batches."""

Basis = tuple[Tensor, Tensor]
"""Of one operand of a call, [e]: the magnitudes of its first product, and those that give the scale."""


@dataclass(frozen=True, kw_only=True)
class FP8Delayed(FP8Current):
    """As FP8Current, with scales from the past; what has grown beyond them and the margin saturates.

    history: steps remembered. margin: powers of two of headroom above the largest of them, at most `LARGEST_MARGIN`.
    algorithm: the "max" of the history, or the "latest" step.
    """

    history: int = 1024
    margin: int = 0
    algorithm: Literal["max", "latest"] = "max"

    name = "fp8_delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = is_whole(self.history) and is_whole(self.margin)
        fits = whole and self.history >= 1 and 0 <= self.margin <= LARGEST_MARGIN
        if not fits or self.algorithm not in ("max", "latest"):
            raise ConfigError(
                f"history {self.history}, margin {self.margin}, algorithm {self.algorithm!r}: need history >= 1, "
                f"margin from 0 to {LARGEST_MARGIN}, and 'max' or 'latest'"
            )

    def state(self) -> RecipeState:
        return FP8DelayedState(self)


class FP8DelayedState(RecipeState):
    """A history for each role, and the calls that may be computed again, newest last, by training mode."""

    def __init__(self, recipe: FP8Delayed) -> None:
        super().__init__(recipe)
        self.margin = recipe.margin
        self.activation_amax, self.weight_amax, self.gradient_amax = (AmaxHistory(recipe) for _ in range(3))
        self.calls = {mode: deque[dict[Role, Basis]](maxlen=REMEMBERED) for mode in (True, False)}

    def reserve(self, num_groups: int) -> None:
        for history in (self.activation_amax, self.weight_amax, self.gradient_amax):
            history.reserve(num_groups)

    def call(self) -> Operands:
        return FP8DelayedCall(self)

    def scale(self, blocks: Blocks, form: ElementFormat, role: Role) -> Scale:
        return self.call().scale(blocks, form, role)

    def earlier(self, first_e: Tensor) -> list[dict[Role, Basis]]:
        """The calls that may be the one with these activations: of this mode, then of the other, each newest first."""
        calls = (*reversed(self.calls[self.training]), *reversed(self.calls[not self.training]))
        return [c for c in calls if "weight" in c and c["activation"][0].device == first_e.device]


class FP8DelayedCall(Operands):
    """One step of each history. Inside a backward, activation and weight are those of a call that has been."""

    def __init__(self, state: FP8DelayedState) -> None:
        self.recipe, self.state = state.recipe, state
        self.recomputed = in_backward()
        self.held: dict[Role, Basis] = {}
        self.earlier: list[dict[Role, Basis]] = []
        self.which: Tensor | None = None  # of the earlier calls: [], their number if none

    def scale(self, blocks: Blocks, form: ElementFormat, role: Role) -> Scale:
        amax = blocks.amax()
        basis_e = self.basis(amax.flatten(), role)
        return float_scale(basis_e.view(amax.shape), form, margin=self.state.margin)

    def basis(self, amax_e: Tensor, role: Role) -> Tensor:
        """The magnitudes that give the scale of an operand with these, [e]."""
        if amax_e.is_meta:
            return amax_e
        history: AmaxHistory = getattr(self.state, f"{role}_amax")
        if role in self.held:
            first_e, basis_e = self.held[role]
            history.also(amax_e.where(amax_e > first_e, 0))  # of a recomputed step the rest is told already
            return basis_e
        if self.recomputed and role != "gradient":
            basis_e = self._again(amax_e, role, history)
        else:
            basis_e = history.step(amax_e)
            if role == "activation" and not torch.is_inference_mode_enabled():  # nothing of that runs again
                self.state.calls[self.state.training].append(self.held)
        self.held[role] = amax_e, basis_e
        return basis_e

    def _again(self, amax_e: Tensor, role: Role, history: AmaxHistory) -> Tensor:
        """What gave the scale in the first run. Which call that was, its activations say, which come first."""
        if self.which is None:
            self.earlier = self.state.earlier(amax_e)
            firsts_Ne = torch.stack([*(call["activation"][0] for call in self.earlier), amax_e])
            self.which = (firsts_Ne == amax_e).all(1).int().argmax()
        bases_Ne = torch.stack([*(call[role][1] for call in self.earlier), history.past(amax_e)])
        basis_e = bases_Ne.index_select(0, self.which.view(1))[0]
        return torch.where(basis_e > 0, basis_e, amax_e)


class AmaxHistory(StateBuffers):
    """history_He [H, e], newest first. Without experts until `reserve` or a first call; follows the data's device."""

    history_He: Tensor

    def __init__(self, recipe: FP8Delayed) -> None:
        super().__init__()
        self.algorithm = recipe.algorithm
        self.register_buffer("history_He", torch.zeros(recipe.history, 0))

    def begin(self) -> None:
        self.history_He.zero_()

    def reserve(self, num_groups: int) -> None:
        """Zeros for so many experts.

        Raises:
            InputError: the history is of another number of experts.
        """
        held = self.history_He.shape[1]
        if held not in (0, num_groups):
            raise InputError(f"an amax history of {held} experts cannot scale {num_groups}: make a new state")
        if held != num_groups:
            self.history_He = self.history_He.new_zeros(len(self.history_He), num_groups)

    def past(self, like_e: Tensor) -> Tensor:
        """The magnitude that the history gives, [e]; 0 where it has none."""
        with torch.inference_mode(False):  # training goes on with it
            self.reserve(like_e.shape[0])
            if self.history_He.device != like_e.device:
                held, there = self.history_He, like_e.device
                self.history_He = torch.zeros_like(held, device=there) if held.is_meta else held.to(there)
        return self.history_He.amax(0) if self.algorithm == "max" else self.history_He[0].clone()

    def step(self, amax_e: Tensor) -> Tensor:
        """The magnitude that gives a new call its scale, [e]; records this call's own."""
        past_e = self.past(amax_e)
        if self.training:
            self.history_He.copy_(self.history_He.roll(1, 0))
            self.history_He[0].copy_(amax_e)
        return torch.where(past_e > 0, past_e, amax_e)

    def also(self, amax_e: Tensor) -> None:
        """Another product of a step, whose tensor may be larger than the first one's: later steps leave room for it."""
        if self.training:
            self.history_He[0].copy_(torch.maximum(self.history_He[0], amax_e))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As bits: a module cast to a narrower dtype keeps its history in float32."""
        return super()._apply(lambda t: fn(t.view(torch.int32)).view(torch.float32), recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the width of what is loaded where it is ours to choose: no experts yet, or none saved."""
        loaded = state_dict.get(f"{prefix}history_He")
        if loaded is not None and loaded.dim() == 2 and 0 in (loaded.shape[1], self.history_He.shape[1]):
            self.history_He = self.history_He.new_zeros(len(self.history_He), loaded.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *args)
