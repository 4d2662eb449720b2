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
from benchmarks.layer_case import LayerCase, LayerData, expert_biases, expert_weights
from benchmarks.names import AUTOCAST
from trimtab import oracle
from trimtab.layout import experts_per_rank

V = 4
BOUNDS = {"fp32": 1e-4, "bf16": 4e-2, AUTOCAST: 4e-2}
"""Largest error relative to the largest true value. Rounding is far below, another function far above."""


def _gpt_oss_gate(pre: Tensor) -> Tensor:
    gate, up = pre[:, ::2].clamp(max=7.0), pre[:, 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


GATES = {"qwen3_moe": oracle.swiglu, "gpt_oss": _gpt_oss_gate}


def probe(width: int) -> Tensor:
    """[width, V] float32."""
    return torch.randn(width, V, generator=torch.Generator().manual_seed(width))


BIASES = ("up bias gradient", "down bias gradient")


def digest(y: Tensor, dx: Tensor, dw: Tensor, dup: Tensor, ddown: Tensor, *d_biases: Tensor) -> dict[str, Tensor]:
    """What a rank reports of its layer's outputs and gradients. d_biases: of up and of down, where they have biases."""
    biases = {name: bias.float() for name, bias in zip(BIASES, d_biases, strict=False)}
    return biases | {
        "y": y.detach().float() @ probe(y.shape[-1]),
        "input gradient": dx.float() @ probe(dx.shape[-1]),
        "routing weight gradient": dw.float(),
        "up gradient": dup.float() @ probe(dup.shape[-1]),
        "down gradient": ddown.float() @ probe(ddown.shape[-1]),
    }


def truth(case: LayerCase, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Each rank's digest, computed in `dtype` from the case's values."""
    ranks = [LayerData.of(case, rank) for rank in range(case.ranks)]
    x, w, dy = (
        torch.cat([t.detach().to(dtype) for t in each])
        for each in ([d.x_TD for d in ranks], [d.w_TK for d in ranks], [d.dy_TD for d in ranks])
    )
    ids = torch.cat([d.ids_TK for d in ranks])
    probe_D, probe_F = probe(case.dim).to(dtype), probe(case.hidden).to(dtype)
    up_EID, down_EDF = expert_weights(case)
    y, dx, dw = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(w)
    dup = torch.zeros(case.num_experts, 2 * case.hidden, V, dtype=dtype)
    ddown = torch.zeros(case.num_experts, case.dim, V, dtype=dtype)
    biases = expert_biases(case)
    d_biases = [] if biases is None else [torch.zeros_like(bias, dtype=dtype) for bias in biases]
    for e in range(case.num_experts):
        t, k = (ids == e).nonzero(as_tuple=True)
        up, down, weight = up_EID[e].to(dtype), down_EDF[e].to(dtype), w[t, k][:, None]
        up_bias, down_bias = (0.0, x.new_zeros(case.dim)) if biases is None else (b[e].to(dtype) for b in biases)
        pre = (x[t] @ up.T + up_bias).requires_grad_()
        hidden = GATES[case.family](pre)
        h, d_hidden = hidden.detach(), dy[t] @ down
        y.index_add_(0, t, weight * (h @ down.T + down_bias))
        dw[t, k] = (h * d_hidden).sum(1) + dy[t] @ down_bias
        (d_pre,) = torch.autograd.grad(hidden, pre, d_hidden * weight)
        dx.index_add_(0, t, d_pre @ up)
        dup[e] = d_pre.T @ (x[t] @ probe_D)
        ddown[e] = dy[t].T @ ((weight * h) @ probe_F)
        for total, rows in zip(d_biases, (d_pre, weight * dy[t]), strict=False):
            total[e] = rows.sum(0)
    cuts, e = [d.x_TD.shape[0] for d in ranks], experts_per_rank(case.num_experts, case.ranks)
    names = ("y", "input gradient", "routing weight gradient", "up gradient", "down gradient", *BIASES[: len(d_biases)])
    by_rank = zip(
        *(torch.split(whole, cuts) for whole in (y @ probe_D, dx @ probe_D, dw)),
        *(torch.split(each, e) for each in (dup, ddown, *d_biases)),
        strict=True,
    )
    return [dict(zip(names, parts, strict=True)) for parts in by_rank]


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
