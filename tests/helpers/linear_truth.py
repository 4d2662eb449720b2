"""The grouped linear map in float64: a plain loop over the groups.

Legend: R rows, G groups, A in features, B out features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Truth:
    """Float64 results, one entry per group where a tensor is per group."""

    y: Tensor
    dx: Tensor
    dw: list[Tensor]
    db: list[Tensor]


def true_results(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, sizes: Sequence[int]) -> Truth:
    """x [R, A], w [G, B, A], b [G, B], dy [R, B]. Rows behind the last segment are zero in y and dx and count nowhere
    else."""
    x, w, dy = (t.detach().double() for t in (x, w, dy))
    truth = Truth(y=torch.zeros_like(dy), dx=torch.zeros_like(x), dw=[], db=[])
    start = 0
    for i, size in enumerate(sizes):
        s = slice(start, start + size)
        truth.y[s] = x[s] @ w[i].t() + (0 if b is None else b[i].detach().double())
        truth.dx[s] = dy[s] @ w[i]
        truth.dw.append(dy[s].t() @ x[s])
        truth.db += [] if b is None else [dy[s].sum(0)]
        start += size
    return truth
