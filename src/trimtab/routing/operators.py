"""The router's operators, and how its results are told to `torch.export`.

    trimtab::replayed(Tensor[] decided, str kind) -> Tensor[]     see `trimtab.routing.recompute`
    trimtab::top(Tensor scores, int k) -> Tensor                  the k best of each row, ties to the lowest index

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

T = TypeVar("T", bound=tuple)  # type: ignore[type-arg]

FEW = 2048
"""Scores up to which one stable sort is faster than K times argmax: 7 us against 37 for a token of 8 of 128 experts."""


def exportable(result: type[T]) -> type[T]:
    """A named tuple that programs of `torch.export` may return: they can be saved and loaded."""
    _register_namedtuple(result, serialized_type_name=f"{result.__module__}.{result.__qualname__}")
    return result


def top(scores_TE: Tensor, k: int) -> Tensor:
    """The k best, best first: [T, k] int64. `torch.topk` leaves the order of ties open."""
    if torch.compiler.is_compiling():  # a graph serves any number of tokens
        picked: Tensor = torch.ops.trimtab.top(scores_TE, k)
        return picked
    return _top(scores_TE, k)


def _top(scores_TE: Tensor, k: int) -> Tensor:
    if scores_TE.numel() <= FEW:
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    left = scores_TE.clamp(min=torch.finfo(scores_TE.dtype).min)  # what was picked lies below any other
    picks = []
    for _ in range(k):
        pick = left.argmax(-1, keepdim=True)
        left.scatter_(1, pick, -math.inf)
        picks.append(pick)
    return torch.cat(picks, dim=1)


def _top_fake(scores_TE: Tensor, k: int) -> Tensor:
    return scores_TE.new_empty(scores_TE.shape[0], k, dtype=torch.int64)


_LIBRARY = torch.library.Library("trimtab", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("top(Tensor scores_TE, int k) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("top", _top, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("trimtab::top", _top_fake, lib=_LIBRARY)
