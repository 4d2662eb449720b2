"""Which matrices a parameter is made of, and the views of them that write through into it.

    [E, 2F, D]   gate above up              sizes (F, F)
    [E, D, 2F]   gpt-oss: in x out, turns   sizes (1, 1), repeats F, axis -1
    [H (a+b), n] two parts in each head     sizes (a, b), repeats H
    [E F, D]     DBRX's stack               sizes (F,), stacks E

Legend: E experts, F hidden dim, D model dim, H heads; B matrices, r repeats, s rows of a part in one repeat, n inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The matrices of a parameter [..., out, in] or [..., in, out].

    sizes: rows of each part along the outputs; several are projections that are stored as one.
    axis: the dim of the outputs: -2, or -1 where the parameter is in x out.
    repeats: how often the parts follow each other: F for gate and up that take turns, the heads for what is stored head
        by head. A part's rows of all repeats are one matrix.
    heads: each repeat's rows are a matrix of their own instead (Muon per head).
    stacks: how many matrices lie behind each other in the first of the last two dims.
    """

    sizes: tuple[int, ...]
    axis: int = -2
    repeats: int = 1
    heads: bool = False
    stacks: int = 1

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape can be made of such matrices."""
        rows, stacked = self.repeats * sum(self.sizes), shape[-2] // self.stacks
        return not shape[-2] % self.stacks and rows == (stacked if self.axis == -2 else shape[-1])

    def views(self, t: Tensor) -> list[Tensor]:
        """For each part a view [B, r, s, n]: B matrices of r s rows, out x in.

        Args:
            t: contiguous, of the parameter's last two dims; the dims before may be others.
        """
        t = t.view(-1, t.shape[-2] // self.stacks, t.shape[-1])
        t = t.mT if self.axis == -1 else t
        parts = torch.split(torch.unflatten(t, -2, (self.repeats, sum(self.sizes))), list(self.sizes), dim=-2)
        return [part.flatten(0, 1).unsqueeze(1) for part in parts] if self.heads else list(parts)

    def matrices(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """(how many, outputs, inputs) for each part of a parameter of this shape."""
        rows = 1 if self.heads else self.repeats
        count = math.prod(shape[:-2]) * self.stacks * self.repeats // rows
        inputs = shape[-2] // self.stacks if self.axis == -1 else shape[-1]
        return [(count, rows * size, inputs) for size in self.sizes]
