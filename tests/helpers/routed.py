"""A layer's routed experts as torchtitan calls them, and their truth: the oracle over all ranks' tokens at once.

Legend: T tokens of a rank, K experts per token, E experts, e local experts, R expert rows, D model dim, F hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab import oracle

E, K, D, F = 8, 3, 16, 12
NAMES = ("y", "dx", "dscores", "dup", "ddown")


@dataclass(frozen=True)
class Share:
    """What one rank gives: tokens, scores, ids and the output's gradient, all [T, *]."""

    x: Tensor
    scores: Tensor
    ids: Tensor
    dy: Tensor


def parameters(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(up [E, 2F, D], down [E, D, F]) of all experts."""
    g = torch.Generator().manual_seed(7)
    up = torch.randn(E, 2 * F, D, generator=g, dtype=torch.float64) / D**0.5
    down = torch.randn(E, D, F, generator=g, dtype=torch.float64) / F**0.5
    return up.to(dtype), down.to(dtype)


def looped_experts(up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows grouped by expert and their counts -> outputs, one expert at a time. NaN behind the last group."""

    def run(rows_RD: Tensor, counts_e: Tensor) -> Tensor:
        parts = rows_RD.split([*counts_e.tolist(), rows_RD.shape[0] - int(counts_e.sum())])
        outs = [oracle.swiglu(part @ up[i].t()) @ down[i].t() for i, part in enumerate(parts[:-1])]
        return torch.cat([*outs, torch.full_like(parts[-1], float("nan"))])

    return run


def call(dispatcher: Any, share: Share, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The body of torchtitan's `RoutedExperts.forward`, with the counts that its MoE makes."""
    picked_TE = torch.zeros(share.x.shape[0], E + 1, dtype=torch.bool).scatter_(1, share.ids % (E + 1), True)
    rows, counts, metadata = dispatcher.dispatch(share.x, share.scores, share.ids, picked_TE[:, :E].sum(0))
    return dispatcher.combine(experts(rows, counts), metadata, share.x)


def run(dispatcher: Any, share: Share, rank: int, ranks: int) -> dict[str, Tensor]:
    """Output and every gradient of one rank's call."""
    e = E // ranks
    up, down = (t[rank * e : rank * e + e].clone().requires_grad_() for t in parameters(share.x.dtype))
    leaf = Share(share.x.clone().requires_grad_(), share.scores.clone().requires_grad_(), share.ids, share.dy)
    y = call(dispatcher, leaf, looped_experts(up, down))
    grads = torch.autograd.grad(y, [leaf.x, leaf.scores, up, down], share.dy)
    return dict(zip(NAMES, (y.detach(), *grads), strict=True))


def truth(shares: Sequence[Share], rank: int) -> dict[str, Tensor]:
    """The same of `rank` in float64, from all ranks' shares: expert gradients sum over all tokens."""
    ranks = len(shares)
    up, down = (t.double().requires_grad_() for t in parameters(shares[0].x.dtype))
    xs = [s.x.double().requires_grad_() for s in shares]
    ws = [s.scores.double().requires_grad_() for s in shares]
    ys = [oracle.moe(x, s.ids, w, up, down) for x, w, s in zip(xs, ws, shares, strict=True)]
    total = torch.stack([(y * s.dy.double()).sum() for y, s in zip(ys, shares, strict=True)]).sum()
    leaves = [xs[rank], ws[rank], up, down]
    if total.requires_grad:
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    else:  # every slot of every token is dropped
        grads = tuple(torch.zeros_like(leaf) for leaf in leaves)
    cut = slice(rank * (E // ranks), (rank + 1) * (E // ranks))
    return dict(zip(NAMES, (ys[rank].detach(), grads[0], grads[1], grads[2][cut], grads[3][cut]), strict=True))
