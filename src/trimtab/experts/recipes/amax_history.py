"""The largest magnitudes of earlier steps, and the scales they give: delayed scaling's state machine.

A step is one pass of one tensor through both of its products. The first product of a step

    1. takes the scale from the history: the largest magnitude of the last H steps (or the latest),
    2. moves the history on by one and writes this step's magnitude,

and the second product of the step, along the other axis, uses the same scale. A product along an axis that this step
has already seen begins the next step; so a layer that never asks for one of the two still moves on.

An expert whose history is all zeros (its first tokens, or none for H steps) takes its scale from the data, as current
scaling does. In eval mode scales are used and nothing moves; in `replay()` the scale of the step in progress is.

Legend: H steps of history, e experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import InputError
from trimtab.experts.recipes.formats import ElementFormat
from trimtab.experts.recipes.scales import Scale, float_scale


class AmaxHistory(nn.Module):
    """Buffers: history_He [H, e], newest first, and basis_e [e], the magnitude that gave the scale in use.

    They have no experts until `reserve` or a first call gives them their width, and follow the data to its device.

    Args:
        length: H.
        form: element format; the scale puts the magnitude at its largest value.
        margin: powers of two left above it.
        algorithm: "max" of the history, or the "latest".
    """

    history_He: Tensor
    basis_e: Tensor

    def __init__(self, length: int, form: ElementFormat, margin: int, algorithm: Literal["max", "latest"]) -> None:
        super().__init__()
        self.form, self.margin, self.algorithm = form, margin, algorithm
        self.register_buffer("history_He", torch.zeros(length, 0))
        self.register_buffer("basis_e", torch.zeros(0))
        self.seen: frozenset[str] = frozenset()
        self.replaying = False

    def reserve(self, num_groups: int) -> None:
        """Zeros for so many experts.

        Raises:
            InputError: the history is of another number of experts.
        """
        length, held = self.history_He.shape
        if held == num_groups:
            return
        if held:
            raise InputError(f"an amax history of {held} experts cannot scale {num_groups}: make a new state")
        self.history_He = self.history_He.new_zeros(length, num_groups)
        self.basis_e = self.basis_e.new_zeros(num_groups)

    def scale(self, amax_e: Tensor, along: str) -> Scale:
        """The scale to use for a tensor with these magnitudes, [e]; records them as the module describes."""
        if amax_e.is_meta:
            return float_scale(amax_e, self.form, margin=self.margin)
        self.reserve(amax_e.shape[0])
        if self.history_He.device != amax_e.device:
            self.to(amax_e.device)
        continues = self.replaying or (bool(self.seen) and along not in self.seen)
        basis_e = self.basis_e if continues else self._past()
        basis_e = torch.where(basis_e > 0, basis_e, amax_e)
        if self.training and not self.replaying:
            self._record(amax_e, basis_e, continues)
            self.seen = self.seen | {along} if continues else frozenset({along})
        return float_scale(basis_e, self.form, margin=self.margin)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Within: the scale of the latest step is used again and nothing is recorded. For activation recompute."""
        before, self.replaying = self.replaying, True
        try:
            yield
        finally:
            self.replaying = before

    def _past(self) -> Tensor:
        return self.history_He.amax(0) if self.algorithm == "max" else self.history_He[0].clone()

    def _record(self, amax_e: Tensor, basis_e: Tensor, continues: bool) -> None:
        if not continues:
            self.history_He.copy_(self.history_He.roll(1, 0))
            self.history_He[0].zero_()
        self.history_He[0].copy_(torch.maximum(self.history_He[0], amax_e))
        self.basis_e.copy_(basis_e)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AmaxHistory:
        """Moves between devices only: a module cast to a narrower dtype keeps its history in float32."""
        super()._apply(lambda t: fn(t.view(torch.int32)).view(torch.float32), recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the width of what is loaded where it is ours to choose: no experts yet, or none saved."""
        loaded = state_dict.get(f"{prefix}history_He")
        if loaded is not None and loaded.dim() == 2 and 0 in (loaded.shape[1], self.history_He.shape[1]):
            self.history_He = self.history_He.new_zeros(self.history_He.shape[0], loaded.shape[1])
            self.basis_e = self.basis_e.new_zeros(loaded.shape[1])
        self.seen = frozenset()
        super()._load_from_state_dict(state_dict, prefix, *args)
