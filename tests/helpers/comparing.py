"""Comparing with the truth: one number per tensor, and the place of the worst element when it is too large."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest true value (over 1 where the truth is all zeros). Shapes must agree."""
    assert ours.shape == truth.shape, f"shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    difference = (ours.detach().double() - truth.detach().double()).abs()
    largest = float(truth.detach().double().abs().max()) if truth.numel() else 0.0
    worst = float(difference.max()) if difference.numel() else 0.0
    return worst / (largest or 1.0) if worst == worst else float("inf")


def assert_close(ours: Tensor, truth: Tensor, bound: float, name: str) -> None:
    """`relative_error` within `bound`; says where the worst element is and both values if not."""
    error = relative_error(ours, truth)
    if not error <= bound:
        difference = (ours.detach().double() - truth.detach().double()).abs().nan_to_num(nan=float("inf"))
        place = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
        raise AssertionError(
            f"{name}{list(place)}: got {ours[place].item():.9g}, expected {truth[place].item():.9g} "
            f"(relative error {error:.2e} > {bound:.0e})"
        )
