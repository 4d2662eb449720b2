"""The grouped linear map in float64, a plain loop over the groups; and the same on what a recipe makes of its operands.

Legend: R rows, S rows in aligned segments, G groups, A in features, B out features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.recipes import RecipeState


@dataclass
class Truth:
    """Float64 results, one entry per group where a tensor is per group."""

    y: Tensor
    dx: Tensor
    dw: list[Tensor]
    db: list[Tensor]


@dataclass
class Operands:
    """What each of the three products multiplies: forward x @ w^T, dgrad dy @ v, wgrad d^T @ z."""

    x: Tensor
    w: Tensor
    dy: Tensor
    v: Tensor
    d: Tensor
    z: Tensor


def results(o: Operands, b: Tensor | None, dy: Tensor, sizes: list[int]) -> Truth:
    """Rows behind the last segment are zero in y and dx and count nowhere else."""
    truth = Truth(
        y=torch.zeros_like(dy, dtype=torch.float64), dx=torch.zeros_like(o.x, dtype=torch.float64), dw=[], db=[]
    )
    start = 0
    for i, size in enumerate(sizes):
        s = slice(start, start + size)
        truth.y[s] = o.x[s].double() @ o.w[i].double().t() + (0 if b is None else b[i].detach().double())
        truth.dx[s] = o.dy[s].double() @ o.v[i].double()
        truth.dw.append(o.d[s].double().t() @ o.z[s].double())
        truth.db += [] if b is None else [dy[s].double().sum(0)]
        start += size
    return truth


def true_results(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, sizes: list[int]) -> Truth:
    """x [R, A], w [G, B, A], b [G, B], dy [R, B]."""
    x, w = x.detach(), w.detach()
    return results(Operands(x=x, w=w, dy=dy, v=w, d=dy, z=x), b, dy, sizes)


def quantised_results(
    state: RecipeState, alignment: int, x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, sizes: list[int]
) -> Truth:
    """`state` as the layer's was before the call. Segments are laid out here on their own, from Python integers."""
    x, w = x.detach(), w.detach()
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // alignment) * alignment)
    offsets = torch.tensor(starts)
    place = torch.cat([start + torch.arange(n) for start, n in zip(starts, sizes, strict=False)])

    def laid_out(rows: Tensor) -> Tensor:
        spread = rows.new_zeros(starts[-1], rows.shape[1])
        spread[place] = rows[: sum(sizes)]
        return spread

    def back(spread: Tensor, like: Tensor) -> Tensor:
        rows = torch.zeros_like(like, dtype=torch.float32)
        rows[: sum(sizes)] = spread[place]
        return rows

    w_GAB, spread_x, spread_dy = w.transpose(1, 2), laid_out(x), laid_out(dy)
    operands = Operands(
        x=back(state.activation(spread_x, offsets, "row"), x),
        w=state.weight(w_GAB, "in").transpose(1, 2),
        z=back(state.activation(spread_x, offsets, "column"), x),
        dy=back(state.gradient(spread_dy, offsets, "row"), dy),
        v=state.weight(w_GAB, "out").transpose(1, 2),
        d=back(state.gradient(spread_dy, offsets, "column"), dy),
    )
    return results(operands, b, dy, sizes)
