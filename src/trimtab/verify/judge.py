"""One tensor against the truth: how far off, and where first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}
"""Largest difference over the largest true value of the tensor, by the dtype that the case runs in."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Where a tensor first leaves its bound. `place` is empty and the values are text where shape or dtype is wrong, or
    no such tensor was asked for."""

    rank: int
    tensor: str
    place: tuple[int, ...]
    got: float | str
    expected: float | str
    error: float

    def __str__(self) -> str:
        values = [f"{v:.9g}" if isinstance(v, float) else v for v in (self.got, self.expected)]
        return (
            f"rank {self.rank}: {self.tensor}{list(self.place) if self.place else ''}: got {values[0]}, "
            f"expected {values[1]} (relative error {self.error:.1e})"
        )


def compare(
    rank: int, name: str, got: Tensor | None, truth: Tensor, bound: float, dtype: torch.dtype | None = None
) -> tuple[float, Mismatch | None]:
    """(relative error, first element beyond `bound` or None). NaN is beyond any bound. dtype: of `got`; any if None."""
    if got is None or got.shape != truth.shape:
        shown = "no tensor" if got is None else f"shape {tuple(got.shape)}"
        return float("inf"), unlike(rank, name, shown, f"shape {tuple(truth.shape)}")
    if dtype is not None and got.dtype != dtype:
        return float("inf"), unlike(rank, name, f"dtype {got.dtype}", f"dtype {dtype}")
    ours, true = got.detach().double().reshape(-1), truth.detach().double().reshape(-1)
    scale = true.abs().max().item() if true.numel() else 0.0
    off = ((ours - true).abs() / (scale or 1.0)).nan_to_num(nan=float("inf"))
    error = off.max().item() if off.numel() else 0.0
    if error <= bound:
        return error, None
    first = int((off > bound).nonzero()[0])
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), truth.shape))
    return error, Mismatch(
        rank=rank, tensor=name, place=place, got=ours[first].item(), expected=true[first].item(), error=error
    )


def unlike(rank: int, name: str, got: str, expected: str) -> Mismatch:
    """A tensor that is wrong before a number of it is read."""
    return Mismatch(rank=rank, tensor=name, place=(), got=got, expected=expected, error=float("inf"))
