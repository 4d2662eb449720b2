"""The largest magnitudes of earlier steps, and the scales they give: delayed scaling's state machine.

A step is one call of a layer, forward and backward. Its first product that takes the tensor

    1. takes the scale from the history: the largest magnitude of the last H steps (or the latest),
    2. moves the history on by one and writes this step's magnitude,

and every other product of that call uses the same scale, whatever other calls came in between: the call holds it.

An expert whose history is all zeros (its first tokens, or none for H steps) takes its scale from the data, as current
scaling does. In eval mode scales are used and nothing moves.

A recomputed forward is the same step again: it moves nothing and finds its scales by the activations' magnitudes, which
are those of one of the last H steps to the bit. (The weights' are those of all microbatches of an optimiser step.) So
activation checkpointing needs no help, however many microbatches are in flight.

Legend: H steps of history, e experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import InputError
from trimtab.experts.recipes.formats import ElementFormat
from trimtab.experts.recipes.scales import Scale, float_scale

NAMES = ("history_He", "basis_He", "first_He")


class AmaxHistory(nn.Module):
    """Buffers: history_He [H, e], newest first; basis_He and first_He [H, e], not saved, for recomputed forwards.

    They have no experts until `reserve` or a first call gives them their width, and follow the data to its device.

    Args:
        length: H.
        form: element format; the scale puts the magnitude at its largest value.
        margin: powers of two left above it.
        algorithm: "max" of the history, or the "latest".
    """

    history_He: Tensor
    basis_He: Tensor
    first_He: Tensor

    def __init__(self, length: int, form: ElementFormat, margin: int, algorithm: Literal["max", "latest"]) -> None:
        super().__init__()
        self.form, self.margin, self.algorithm = form, margin, algorithm
        for name in NAMES:
            self.register_buffer(name, torch.zeros(length, 0, dtype=torch.float32), persistent=name == "history_He")

    def reserve(self, num_groups: int) -> None:
        """Zeros for so many experts.

        Raises:
            InputError: the history is of another number of experts.
        """
        held = self.history_He.shape[1]
        if held == num_groups:
            return
        if held:
            raise InputError(f"an amax history of {held} experts cannot scale {num_groups}: make a new state")
        self._widen(num_groups)

    def step(self, amax_e: Tensor) -> Tensor:
        """The magnitude that gives a new step its scale, [e]; records this step's own."""
        if amax_e.is_meta:
            return amax_e
        past_e = self._past(amax_e)
        basis_e = torch.where(past_e > 0, past_e, amax_e)
        if self.training:
            for rows_He, newest_e in ((self.history_He, amax_e), (self.first_He, amax_e), (self.basis_He, basis_e)):
                rows_He.copy_(rows_He.roll(1, 0))
                rows_He[0].copy_(newest_e)
        return basis_e

    def which(self, amax_e: Tensor) -> Tensor:
        """How many steps ago these magnitudes were a step's, the latest such step: [], H if there was none."""
        if amax_e.is_meta:
            return amax_e.new_empty((), dtype=torch.int64)
        self._past(amax_e)
        length = self.first_He.shape[0]
        number_H = torch.arange(length, device=amax_e.device)
        return torch.where((self.first_He == amax_e).all(1), number_H, length).amin()

    def again(self, amax_e: Tensor, ago: Tensor) -> Tensor:
        """What `step` gave so many steps ago, [e]; as in eval mode for H."""
        if amax_e.is_meta:
            return amax_e
        past_e = self._past(amax_e)
        length = self.first_He.shape[0]
        known_e = self.basis_He.index_select(0, ago.clamp(max=length - 1).view(1))[0]
        basis_e = torch.where(ago < length, known_e, past_e)
        return torch.where(basis_e > 0, basis_e, amax_e)

    def also(self, amax_e: Tensor) -> None:
        """Another product of a step, whose tensor may be larger than the first one's: later steps leave room for it."""
        if self.training and not amax_e.is_meta:
            self.history_He[0].copy_(torch.maximum(self.history_He[0], amax_e))

    def scale(self, basis_e: Tensor) -> Scale:
        """The scale that a magnitude gives."""
        return float_scale(basis_e, self.form, margin=self.margin)

    def _past(self, like_e: Tensor) -> Tensor:
        self.reserve(like_e.shape[0])
        for name in NAMES:
            held = getattr(self, name)
            if held.device != like_e.device:
                there = like_e.device
                setattr(self, name, torch.zeros_like(held, device=there) if held.is_meta else held.to(there))
        return self.history_He.amax(0) if self.algorithm == "max" else self.history_He[0]

    def _widen(self, num_groups: int) -> None:
        for name in NAMES:
            held = getattr(self, name)
            setattr(self, name, held.new_zeros(held.shape[0], num_groups))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AmaxHistory:
        """Moves between devices only: a module cast to a narrower dtype keeps its history in float32. What was on the
        meta device begins at zero."""

        def moved(t: Tensor) -> Tensor:
            made = fn(t.view(torch.int32)).view(torch.float32)
            return made.zero_() if t.is_meta and not made.is_meta else made

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the width of what is loaded where it is ours to choose: no experts yet, or none saved. From a checkpoint
        without the recipe nothing is taken."""
        loaded = state_dict.get(f"{prefix}history_He")  # the one that is saved
        if loaded is None:
            return
        if loaded.dim() == 2 and 0 in (loaded.shape[1], self.history_He.shape[1]):
            self._widen(loaded.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *args)
