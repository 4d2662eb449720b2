"""Low-rank adapters of the experts' weights (LoRA, Hu et al. 2021, arXiv 2106.09685): x W^T + scale (x a^T) b^T.

Legend: e local experts, F expert hidden dim, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One adapter of one weight [e, out, in].

    a: [e, r, in], or [1, r, in] that all experts share. b: [e, out, r] or [1, out, r], its rows in the order of the
    weight's outputs (a gate and up in one: gate first, or in turn where the weight has them so).
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Of both weights of the experts; None where one has none. dropout: of the rows that go into `a`, in training."""

    up: Pair | None = None
    down: Pair | None = None
    dropout: float = 0.0


def added(pairs: Sequence[Pair]) -> Pair | None:
    """One pair that gives the sum of all; None of none."""
    if len(pairs) < 2:
        return next(iter(pairs), None)
    experts = max(max(p.a.shape[0], p.b.shape[0]) for p in pairs)
    scale = pairs[0].scale
    a = torch.cat([p.a.expand(experts, -1, -1) for p in pairs], 1)
    b = torch.cat([(p.b if p.scale == scale else p.b * (p.scale / scale)).expand(experts, -1, -1) for p in pairs], 2)
    return Pair(a=a, b=b, scale=scale)


def gate_and_up(gate: Pair | None, up: Pair | None, hidden: int) -> Pair | None:
    """One pair of `gate_up` from a gate's and an up's own, each [e, F, D]; hidden: F."""

    def placed(pair: Pair | None, before: int) -> list[Pair]:
        if pair is None:
            return []
        return [replace(pair, b=torch.nn.functional.pad(pair.b, (0, 0, before, hidden - before)))]

    return added(placed(gate, 0) + placed(up, hidden))


def experts_last(thin: Tensor) -> bool:
    """Whether a pair's tensor [e, out, r] lies in memory as [out, r, e], as peft's b does: what turns it as a matrix
    [out * r, e] takes a third of the time of a copy that is left to strides."""
    e, _, r = thin.shape
    return thin.stride() == (1, r * e, e) and not thin.is_contiguous()


def experts_first(thin: Tensor, out: Tensor) -> Tensor:
    """`thin` into `out`, contiguous and perhaps of another dtype."""
    if not experts_last(thin):
        return out.copy_(thin)
    flat = thin.permute(1, 2, 0).reshape(-1, thin.shape[0]).to(out.dtype)
    out.view(thin.shape[0], -1).copy_(flat.t())
    return out


def lying_as(value: Tensor, like: Tensor) -> Tensor:
    """A contiguous [e, out, r], with the strides of `like` if experts come last there: its views cost nothing then."""
    if not experts_last(like):
        return value
    e, out, r = value.shape
    return value.view(e, -1).t().contiguous().view(out, r, e).permute(2, 0, 1)
