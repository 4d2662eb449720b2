"""The largest magnitudes of earlier steps, and the scales they give: delayed scaling's state machine.

A step is one call of a layer, forward and backward. Its first product that takes the tensor

    1. takes the scale from the history: the largest magnitude of the last H steps (or the latest),
    2. moves the history on by one and writes this step's magnitude,

and every other product of that call uses the same scale, whatever other calls came in between: the call holds it.

An expert whose history is all zeros (its first tokens, or none for H steps) takes its scale from the data, as current
scaling does. In eval mode scales are used and the history does not move.

A recomputed forward is the same call again: it moves nothing and finds its scales by the activations' magnitudes, which
are to the bit those of one of the calls remembered for it. (The weights' are those of all microbatches of an optimiser
step.) These are the last N in training and the last N in eval mode, each kept apart from the other's: calls on the same
data have other scales there. The mode of the recompute is asked first. Calls in eval mode without gradients are among
them: the first run of a reentrant checkpoint looks no different. So activation checkpointing needs no help with up to N
calls in flight; the recompute of an older one takes the scales that a new call in eval mode would.

Legend: H steps of history, N calls remembered, e experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import InputError
from trimtab.experts.recipes.formats import ElementFormat
from trimtab.experts.recipes.scales import Scale, float_scale

EMPTY = {"history_He": 0.0, "first_2Ne": -1.0, "basis_2Ne": 0.0}
"""What the buffers begin with: -1 is no magnitude, also not that of an expert without tokens."""

REMEMBERED = 256
"""N: a pipeline has as many calls in flight as it has stages, or micro-batches."""


class AmaxHistory(nn.Module):
    """Buffers, newest first: history_He [H, e]; first_2Ne and basis_2Ne [2, N, e], not saved, for recomputed forwards:
    what came and what gave the scale, in eval mode and in training.

    They have no experts until `reserve` or a first call gives them their width, and follow the data to its device.

    Args:
        length: H.
        form: element format; the scale puts the magnitude at its largest value.
        margin: powers of two left above it.
        algorithm: "max" of the history, or the "latest".
        remembered: N; 0 for what no recompute asks for, as gradients.
    """

    history_He: Tensor
    first_2Ne: Tensor
    basis_2Ne: Tensor

    def __init__(
        self, length: int, form: ElementFormat, margin: int, algorithm: Literal["max", "latest"],
        remembered: int = REMEMBERED,
    ) -> None:  # fmt: skip
        super().__init__()
        self.form, self.margin, self.algorithm = form, margin, algorithm
        for name, empty in EMPTY.items():
            saved = name == "history_He"
            rows = (length,) if saved else (2, remembered)
            self.register_buffer(name, torch.full((*rows, 0), empty, dtype=torch.float32), persistent=saved)

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
        """The magnitude that gives a new call its scale, [e]; records this call's own."""
        if amax_e.is_meta:
            return amax_e
        past_e = self._past(amax_e)
        basis_e = torch.where(past_e > 0, past_e, amax_e)
        if self.training:
            _push(self.history_He, amax_e)
        if self.first_2Ne.shape[1] and not torch.is_inference_mode_enabled():  # nothing of that runs again
            _push(self.first_2Ne[int(self.training)], amax_e)
            _push(self.basis_2Ne[int(self.training)], basis_e)
        return basis_e

    def which(self, amax_e: Tensor) -> Tensor:
        """Which remembered call had these magnitudes: [], for `again`. The latest of this mode, else of the other."""
        if amax_e.is_meta:
            return amax_e.new_empty((), dtype=torch.int64)
        self._past(amax_e)
        first_Me = self._this_mode_first(self.first_2Ne)
        number_M = torch.arange(len(first_Me), device=amax_e.device)
        return torch.where((first_Me == amax_e).all(1), number_M, len(first_Me)).amin()

    def again(self, amax_e: Tensor, which: Tensor) -> Tensor:
        """What `step` gave that call, [e]; if there was none, what it would give now in eval mode."""
        if amax_e.is_meta:
            return amax_e
        past_e = self._past(amax_e)
        basis_Me = self._this_mode_first(self.basis_2Ne)
        known_e = basis_Me.index_select(0, which.clamp(max=len(basis_Me) - 1).view(1))[0]
        basis_e = torch.where(which < len(basis_Me), known_e, past_e)
        return torch.where(basis_e > 0, basis_e, amax_e)

    def also(self, amax_e: Tensor) -> None:
        """Another product of a step, whose tensor may be larger than the first one's: later steps leave room for it."""
        if self.training and not amax_e.is_meta:
            self.history_He[0].copy_(torch.maximum(self.history_He[0], amax_e))

    def scale(self, basis_e: Tensor) -> Scale:
        """The scale that a magnitude gives."""
        return float_scale(basis_e, self.form, margin=self.margin)

    def _this_mode_first(self, held_2Ne: Tensor) -> Tensor:
        """[2 N, e]: the calls of this mode, then those of the other, each newest first."""
        return (held_2Ne.flip(0) if self.training else held_2Ne).flatten(0, 1)

    def _past(self, like_e: Tensor) -> Tensor:
        with torch.inference_mode(False):  # training goes on with them
            self.reserve(like_e.shape[0])
            for name, empty in EMPTY.items():
                held = getattr(self, name)
                if held.device != like_e.device:
                    there = like_e.device
                    setattr(self, name, torch.full_like(held, empty, device=there) if held.is_meta else held.to(there))
        return self.history_He.amax(0) if self.algorithm == "max" else self.history_He[0]

    def _widen(self, num_groups: int) -> None:
        for name, empty in EMPTY.items():
            held = getattr(self, name)
            setattr(self, name, held.new_full((*held.shape[:-1], num_groups), empty))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AmaxHistory:
        """Moves between devices only: a module cast to a narrower dtype keeps its history in float32. What was on the
        meta device begins empty."""
        before = {name: getattr(self, name).is_meta for name in EMPTY}
        super()._apply(lambda t: fn(t.view(torch.int32)).view(torch.float32), recurse)  # type: ignore[no-untyped-call]
        for name, empty in EMPTY.items():
            held = getattr(self, name)
            if before[name] and not held.is_meta:
                held.fill_(empty)
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


def _push(rows_Ne: Tensor, newest_e: Tensor) -> None:
    """One row on, in place."""
    rows_Ne.copy_(rows_Ne.roll(1, 0))
    rows_Ne[0].copy_(newest_e)
