"""The truth of a case: routing, experts and loss of every data-parallel rank in one process, in float64.

    logits = h W_r^T    p = softmax(logits)    w = p[ids]
    y = sum over k of  w * expert[ids](h)      h of the next layer = h + y      loss = mean over ranks of sum(y * dy)

Where ranks share sequences the loss has for each layer E / N * sum over tokens of f . p besides, f the fractions of a
sequence's slots that each expert got.

The experts are evaluated densely, all tokens by all experts; a test holds this equal to `oracle.moe`.

Legend: N tokens, K experts per token, D model dim, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.oracle import swiglu
from trimtab.verify.problem import BALANCE, Batch, LayerWeights, Problem


@dataclass(frozen=True, kw_only=True)
class Truth:
    """y_BLD and dx_BLD by data-parallel rank (of that rank's own loss); gradients by parameter name, of the mean
    loss over the data-parallel ranks; loads_E by layer, over all ranks."""

    y: list[Tensor]
    dx: list[Tensor]
    grads: dict[str, Tensor]
    loads: list[Tensor]


def dense_moe(x_ND: Tensor, ids_NK: Tensor, w_NK: Tensor, up_EID: Tensor, down_EDF: Tensor) -> Tensor:
    """As `oracle.moe`, for tokens that are all real; ids of -1 give nothing."""
    out_NED = torch.einsum("nef,edf->ned", swiglu(torch.einsum("nd,eid->nei", x_ND, up_EID)), down_EDF)
    kept_NK = ids_NK >= 0
    index = ids_NK.clamp_min(0)[..., None].expand(*ids_NK.shape, x_ND.shape[1])
    return (out_NED.gather(1, index) * torch.where(kept_NK, w_NK, 0)[..., None]).sum(1)


def route(h_ND: Tensor, ids_NK: Tensor, router_ED: Tensor) -> Tensor:
    """Weights [N, K] of given choices: softmax over all experts. Not normalised: at K = 1 that has no gradient."""
    return (h_ND @ router_ED.T).softmax(1).gather(1, ids_NK.clamp_min(0))


@dataclass(frozen=True, kw_only=True)
class _Routed:
    """What the real tokens of one rank did in one layer: their sequence, scores and choices."""

    sequence_N: Tensor
    p_NE: Tensor
    ids_NK: Tensor


def _forward(batch: Batch, x: Tensor, layers: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[_Routed]]:
    """(y, what the real tokens of each layer did). Masked tokens pass through with nothing added."""
    real = torch.ones(x.shape[:2], dtype=torch.bool) if batch.mask_BL is None else batch.mask_BL
    h, ids, chosen = x[real], batch.ids_BLK[real], []
    y = h
    for layer, (router, up, down) in enumerate(layers):
        # The router of layer i reads the logits two experts further on: see `make_weights`.
        picked = torch.where(ids >= 0, (ids - 2 * layer) % router.shape[0], -1)
        y = dense_moe(h, picked, route(h, picked, router), up, down)
        chosen.append(_Routed(sequence_N=real.nonzero()[:, 0], p_NE=(h @ router.T).softmax(1), ids_NK=picked))
        h = h + y
    return torch.zeros_like(x).masked_scatter(real[..., None].expand_as(x), y), chosen


def _balance(ranks: Sequence[_Routed], cp: int) -> Tensor:
    """The loss per sequence of one layer, over all ranks; `cp` of them in turn hold the same sequences."""
    total = torch.zeros((), dtype=torch.float64)
    for group in (ranks[i : i + cp] for i in range(0, len(ranks), cp)):
        sequence, p, ids = (torch.cat([getattr(r, name) for r in group]) for name in ("sequence_N", "p_NE", "ids_NK"))
        for b in set(sequence.tolist()):
            counts = (ids[sequence == b] + 1).reshape(-1).bincount(minlength=p.shape[1] + 1)[1:].double()
            total = total + (counts / counts.sum().clamp(min=1) * p[sequence == b]).sum()
    return total * ranks[0].p_NE.shape[1] / max(sum(r.p_NE.shape[0] for r in ranks), 1)


def solve(problem: Problem, weights: Sequence[LayerWeights]) -> Truth:
    """Outputs, input gradients and parameter gradients of every rank."""
    layers = [[w.router_ED.clone(), w.up_EID.clone(), w.down_EDF.clone()] for w in weights]
    for params in layers:
        for param in params:
            param.requires_grad_()
    xs = [batch.x_BLD.clone().requires_grad_() for batch in problem.batches]
    passes = [_forward(batch, x, layers) for batch, x in zip(problem.batches, xs, strict=True)]
    losses = [(y * batch.dy_BLD).sum() for (y, _), batch in zip(passes, problem.batches, strict=True)]
    if problem.cp > 1:
        each = zip(*(routed for _, routed in passes), strict=True)
        losses += [len(xs) * BALANCE * _balance(ranks, problem.cp) for ranks in each]
    leaves = [*xs, *(p for params in layers for p in params)]
    found = torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True, materialize_grads=True)
    ranks, experts = len(xs), problem.sizes.num_experts
    names = [f"{i}.{name}" for i in range(len(layers)) for name in ("router", "up", "down")]
    loads = [
        torch.cat([chosen[i].ids_NK.reshape(-1) for _, chosen in passes]).add(1).bincount(minlength=experts + 1)[1:]
        for i in range(len(layers))
    ]
    return Truth(
        y=[y.detach() for y, _ in passes],
        dx=list(found[:ranks]),
        grads={name: grad / ranks for name, grad in zip(names, found[ranks:], strict=True)},
        loads=loads,
    )
