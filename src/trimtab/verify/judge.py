"""What a rank holds against the truth: how far off each tensor is, and where it first leaves its bound."""

from __future__ import annotations

import torch
from torch import Tensor

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}
"""Largest difference over the largest true value of the tensor, by the dtype that the case runs in."""
Dtypes = dict[str, torch.dtype]


def compare(
    got: dict[str, Tensor], true: dict[str, Tensor], bound: float, dtypes: Dtypes
) -> dict[str, tuple[float, str]]:
    """By name: the relative error, and what is wrong, or "". NaN is beyond any bound.

    A tensor that is missing, of another shape or of another dtype than `dtypes` says, or that nobody asked for, is
    wrong before a number of it is read.
    """
    found = {name: _compare_one(got.get(name), truth, bound, dtypes.get(name)) for name, truth in true.items()}
    for name in sorted(got.keys() - true.keys()):
        found[name] = float("inf"), _unlike(f"shape {tuple(got[name].shape)}", "no such tensor")
    return {name: (error, said and name + said) for name, (error, said) in found.items()}


def _compare_one(got: Tensor | None, truth: Tensor, bound: float, dtype: torch.dtype | None) -> tuple[float, str]:
    if got is None or got.shape != truth.shape:
        shown = "no tensor" if got is None else f"shape {tuple(got.shape)}"
        return float("inf"), _unlike(shown, f"shape {tuple(truth.shape)}")
    if dtype is not None and got.dtype != dtype:
        return float("inf"), _unlike(f"dtype {got.dtype}", f"dtype {dtype}")
    ours, true = got.detach().double().reshape(-1), truth.detach().double().reshape(-1)
    scale = true.abs().max().item() if true.numel() else 0.0
    off = ((ours - true).abs() / (scale or 1.0)).nan_to_num(nan=float("inf"))
    error = off.max().item() if off.numel() else 0.0
    if error <= bound:
        return error, ""
    first = int((off > bound).nonzero()[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), truth.shape)]
    said = f"got {ours[first].item():.9g}, expected {true[first].item():.9g} (relative error {error:.1e})"
    return error, f"{place or ''}: {said}"


def _unlike(got: str, expected: str) -> str:
    return f": got {got}, expected {expected}"


def column_of(name: str) -> str:
    """The ledger's column of a tensor: the same for every layer."""
    return " ".join(part for part in name.replace(".", " ").split() if not part.isdigit())
