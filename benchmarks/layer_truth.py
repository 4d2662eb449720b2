"""What a layer should give: plain formulas over one expert at a time, on all ranks' tokens.

Large results are compared through their products with a few random vectors, which every element takes part in.

Legend: T tokens of a rank, K experts per token, D model dim, F expert hidden dim, E experts, e experts of a rank,
V random vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.contestant import Contestant
from benchmarks.layer_case import AUTOCAST, LayerCase, LayerData, expert_weights
from trimtab import oracle
from trimtab.layout import experts_per_rank

V = 4
BOUNDS = {"fp32": 1e-4, "bf16": 4e-2, AUTOCAST: 4e-2}
"""Largest error relative to the largest true value. Rounding is far below, another function far above."""
NAMES = ("y", "input gradient", "routing weight gradient", "gate and up gradient", "down gradient")


def probe(like: Tensor) -> Tensor:
    """[width, V] float32, for a tensor whose last dimension has that width."""
    width = like.shape[-1]
    return torch.randn(width, V, generator=torch.Generator().manual_seed(width)).to(like.device)


def digest(y: Tensor, dx: Tensor, dw: Tensor, d_gate_up: Tensor, d_down: Tensor) -> dict[str, Tensor]:
    """What a rank reports of its layer's outputs and gradients."""
    short = [_short(value) for value in (y, dx, d_gate_up, d_down)]
    values = (short[0], short[1], dw.float(), short[2], short[3])
    return {name: value.cpu() for name, value in zip(NAMES, values, strict=True)}


def _short(value: Tensor) -> Tensor:
    """[..., V]. A few experts or thousands of tokens at a time: all of them in float32 are much memory."""
    with_V = probe(value)
    return torch.cat([part.float() @ with_V for part in value.split(8 if value.ndim > 2 else 8192)])


def truth(
    case: LayerCase, dtype: torch.dtype = torch.float32, weights: tuple[Tensor, Tensor] | None = None
) -> list[dict[str, Tensor]]:
    """Each rank's digest, computed in `dtype` from the case's values. weights: of `expert_weights`, if at hand."""
    ranks = [LayerData.of(case, rank) for rank in range(case.ranks)]
    x, w, dy = (
        torch.cat([t.detach().to(dtype) for t in each])
        for each in ([d.x_TD for d in ranks], [d.w_TK for d in ranks], [d.dy_TD for d in ranks])
    )
    ids = torch.cat([d.ids_TK for d in ranks])
    gate_up_EID, down_EDF = expert_weights(case) if weights is None else weights
    probe_D, probe_F = probe(x).to(dtype), probe(down_EDF).to(dtype)
    y, dx, dw = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(w)
    d_gate_up = x.new_zeros(case.num_experts, 2 * case.hidden, V)
    d_down = x.new_zeros(case.num_experts, case.dim, V)
    for e in range(case.num_experts):
        t, k = (ids == e).nonzero(as_tuple=True)
        gate_up, down, weight = gate_up_EID[e].to(dtype), down_EDF[e].to(dtype), w[t, k][:, None]
        pre = (x[t] @ gate_up.T).requires_grad_()
        hidden = oracle.swiglu(pre)
        h, d_hidden = hidden.detach(), dy[t] @ down
        y.index_add_(0, t, weight * (h @ down.T))
        dw[t, k] = (h * d_hidden).sum(1)
        (d_pre,) = torch.autograd.grad(hidden, pre, d_hidden * weight)
        dx.index_add_(0, t, d_pre @ gate_up)
        d_gate_up[e] = d_pre.T @ (x[t] @ probe_D)
        d_down[e] = dy[t].T @ ((weight * h) @ probe_F)
    cuts, experts = [d.x_TD.shape[0] for d in ranks], experts_per_rank(case.num_experts, case.ranks)
    by_rank = zip(
        *(torch.split(whole.cpu(), cuts) for whole in (y @ probe_D, dx @ probe_D, dw)),
        *(torch.split(whole.cpu(), experts) for whole in (d_gate_up, d_down)),
        strict=True,
    )
    return [dict(zip(NAMES, parts, strict=True)) for parts in by_rank]


def layer_judge() -> Callable[[Contestant, list[dict[str, Tensor]]], str | None]:
    """A judge of layers. The truth of a case is computed once."""
    known: dict[LayerCase, list[dict[str, Tensor]]] = {}

    def judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
        case = LayerCase.of(contestant.args)
        if case not in known:
            known[case] = truth(case)
        return compare(outcomes, known[case], BOUNDS[case.dtype])

    return judge


def compare(outcomes: list[dict[str, Tensor]], true: list[dict[str, Tensor]], bound: float) -> str | None:
    """The first difference, or None."""
    for rank, (mine, theirs) in enumerate(zip(outcomes, true, strict=True)):
        for name, value in theirs.items():
            where = f"{name} of rank {rank}" if len(true) > 1 else name
            got = mine[name]
            if got.shape != value.shape:
                return f"{where} has the shape {tuple(got.shape)}, expected {tuple(value.shape)}"
            scale = max((float(t[name].abs().max()) for t in true if t[name].numel()), default=0.0)
            off = (got.to(value.dtype) - value).abs()
            if not bool((off <= bound * scale).all()):  # NaN is not
                error = float(off.max()) / scale if scale else float(off.max())
                return f"{where} is off by {error:.1e} of its largest value (bound {bound:.0e})"
    return None
