"""Comparing with the truth: one number per tensor, and the place of the worst element when it is too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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


def gradients(y: Tensor, leaves: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """Those of a true `y` in float64, zeros where it does not depend on a leaf."""
    if not y.requires_grad:
        return [torch.zeros_like(t, dtype=torch.float64) for t in leaves]
    return list(torch.autograd.grad(y, leaves, dy.double(), allow_unused=True, materialize_grads=True))


def rounded(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A true activation of pre-activations that are rounded as experts in `dtype` round them: a clamp's slope is
    decided by the rounded value. The gradient goes through."""
    return lambda pre: function(pre + (pre.to(dtype).double() - pre).detach())


def cut(x: Tensor, high: float, low: float = -math.inf) -> Tensor:
    """As `clamp`; what lies at a limit has a slope, which that of torch 2.15 and newer no longer gives it."""
    return x.masked_fill(x > high, high).masked_fill(x < low, low)


def full_value(tensor: Tensor) -> Tensor:
    """As `full_tensor`. Every rank of the tensor's mesh calls.

    torch 2.11 refuses a gate and an up half that are cut alike, before it sends anything. There each placement is
    undone by itself, the last mesh dim's first.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    try:
        return tensor.full_tensor()
    except ValueError as error:
        if "unable to be interpreted into a corresponding shard_order" not in str(error):
            raise
    mesh, placements, local = tensor.device_mesh, tensor.placements, tensor.to_local()
    for dim in reversed(range(mesh.ndim)):
        if not placements[dim].is_replicate():
            before = [*placements[:dim], *[Replicate()] * (mesh.ndim - dim)]
            shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, before)
            local = placements[dim]._to_replicate_tensor(local, mesh, dim, list(shape))  # type: ignore[attr-defined]
    return local
