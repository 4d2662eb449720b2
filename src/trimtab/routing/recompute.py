"""Decisions survive activation recompute: a forward that runs again inside a backward takes the ones it took before.

The second run of a forward may differ from the first in the last bits, and a near-tie then falls the other way: counts
change and recompute fails, or worse, does not. So each router remembers its decisions until they cannot be asked for
any more, and a forward inside a backward asks. Which of several forwards in flight (micro-batches of a pipeline) runs
again is told by the sum of its tokens: nearly equal for the same tokens, far from equal for others.

A decision lives as long as the autograd graph of its forward. Where there is none (the first run under reentrant
`torch.utils.checkpoint` has gradients off) it is kept, in training mode, until it is asked for, `limit` of them at
most. Of several forwards of the same tokens the last counts; those that were given their `ids` are given them again.
Under `torch.compile` nothing is remembered: what is run again there is the same compiled graph.

Legend: T tokens, D model dim, K experts per token, C columns that are summed.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

COLUMNS = 64
"""How many of a token's columns are summed: all would cost as much as a copy of the tokens, and more in bf16."""

TOLERANCE = 0.05
"""How far apart the sums of the tokens of two runs may be, relative to their size. bfloat16 rounding makes 0.004."""

SAME = 8.0
"""How many times as far as the nearest may be the sum of the same tokens: other tokens are hundreds of times as far."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Ids: chosen [T, K], and kept [T, K], which is -1 also where the expert had no room."""

    chosen: Tensor
    kept: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Remembered:
    """A choice, the sum of the tokens it was made for, the state that their jitter was drawn from, and the counts of
    the micro-batches before."""

    choice: Choice
    sum_C: Tensor
    noise: Tensor | None
    counts_before_E: Tensor


class _Hold(Function):
    """The identity; its node keeps `remembered` alive."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, remembered: Remembered) -> Tensor:
        ctx.remembered = remembered
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, d_TK: Tensor) -> tuple[Tensor, None]:
        return d_TK, None


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as a recomputed forward does."""
    return torch._C._current_graph_task_id() != -1  # no public function says this


def token_sum(x_TD: Tensor) -> Tensor:
    """Sum over the tokens of their first columns, in float32 at least: what tells micro-batches apart."""
    return x_TD.detach()[:, :COLUMNS].sum(0, dtype=torch.promote_types(x_TD.dtype, torch.float32))


class Memory:
    """The decisions of one router that a recompute may ask for. Copies and pickles are empty.

    Args:
        limit: how many forwards without a graph are remembered; a pipeline has as many in flight as it has stages.
    """

    def __init__(self, limit: int = 64) -> None:
        self._in_graphs: list[weakref.ref[Remembered]] = []
        self._held: deque[Remembered] = deque(maxlen=limit)

    def hold(self, remembered: Remembered, weights_TK: Tensor, training: bool) -> Tensor:
        """Remember; the weights must be used in place of those given."""
        if weights_TK.requires_grad:
            self._in_graphs = [ref for ref in self._in_graphs if ref() is not None]
            self._in_graphs.append(weakref.ref(remembered))
            held: Tensor = _Hold.apply(weights_TK, remembered)  # type: ignore[no-untyped-call]
            return held
        if training:
            self._held.append(remembered)
        return weights_TK

    def recall(self, tokens: int, sum_C: Tensor) -> Remembered | None:
        """What was decided for these tokens, if this is a forward that runs again. One host sync then, on a device."""
        if not in_backward():
            return None
        in_graphs = [one for one in (ref() for ref in self._in_graphs) if one is not None]
        newest_first = (*reversed(in_graphs), *reversed(self._held))
        alike = (tokens, sum_C.dtype, sum_C.device)
        known = [m for m in newest_first if (m.choice.chosen.shape[0], m.sum_C.dtype, m.sum_C.device) == alike]
        if not known:
            return None
        size = sum_C.norm().clamp(min=torch.finfo(sum_C.dtype).tiny)
        distances = ((torch.stack([one.sum_C for one in known]) - sum_C).norm(dim=-1) / size).tolist()
        near = min(distances)
        if not near <= TOLERANCE:
            return None
        found = next(one for one, far in zip(known, distances, strict=True) if far <= SAME * near)
        if any(one is found for one in self._held):
            self._held = deque((one for one in self._held if one is not found), maxlen=self._held.maxlen)
        return found

    def alive(self) -> int:
        """How many decisions may still be asked for."""
        return len(self._held) + sum(ref() is not None for ref in self._in_graphs)

    def __getstate__(self) -> dict[str, Any]:
        return {"_in_graphs": [], "_held": deque(maxlen=self._held.maxlen)}
