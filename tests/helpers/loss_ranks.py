"""Balance losses on real ranks: other numbers of sequences, none on one rank, masks, and the schedule of collectives.

Sequences that are cut over ranks, micro-batches and totals of a step: tests/parallel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.router_truth import truth_losses
from trimtab.routing.config import RouterConfig
from trimtab.routing.losses import LossGroups
from trimtab.routing.router import Router

D, E, K = 8, 6, 2
COEFFICIENTS = {"aux": 0.5, "sequence_aux": 0.25, "global_aux": 2.0, "z": 0.125}


def make(kind: str) -> Router:
    coefficients = {f"{name}_loss": value for name, value in COEFFICIENTS.items()}
    config = RouterConfig(num_experts=E, top_k=K, score=kind, **coefficients)  # type: ignore[arg-type]
    router = Router(config, D, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.randn(E, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    router.groups = LossGroups(batch=dist.group.WORLD)
    return router


def data(seed: int, batch: int, masked: float) -> tuple[Tensor, Tensor]:
    """(x [B, 5, D], mask [B, 5]); what the mask hides is NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 5, D, generator=g, dtype=torch.float64)
    mask = torch.rand(batch, 5, generator=g) >= masked
    return x.masked_fill(~mask[..., None], float("nan")), mask


def gap(kind: str, parts: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference, of losses and the weight's gradient, to one process with all parts as one batch."""
    router, (x, mask) = make(kind), parts[dist.get_rank()]
    losses = router.losses(router(x.flatten(0, 1), token_mask_T=mask.flatten(), batch=x.shape[0]))
    (grad,) = torch.autograd.grad(sum(losses.values()), router.weight)
    dist.all_reduce(grad)
    weight = router.weight.detach().clone().requires_grad_()
    x, mask = (torch.cat([part[i].flatten(0, 1) for part in parts]) for i in (0, 1))
    logits, ids = x.nan_to_num(0) @ weight.T, router(x, token_mask_T=mask).ids_TK
    found = truth_losses(logits, ids, mask, sum(len(part[0]) for part in parts), router.config)
    true = {name: found[name] * factor for name, factor in COEFFICIENTS.items()}
    (true_grad,) = torch.autograd.grad(sum(true.values()), weight)
    values = torch.stack([losses[name].detach() - true[name].detach() for name in COEFFICIENTS])
    return float(torch.cat([values, (grad / len(parts) - true_grad).flatten()]).abs().max())


def on_ranks() -> dict[str, float]:
    """Largest difference to one process, by case: none may be NaN."""
    ranks, gaps = dist.get_world_size(), {"collectives": collectives(dist.get_rank())}
    for kind in ("softmax", "sigmoid", "sqrtsoftplus"):
        for masked in (0.0, 0.5, 1.0):
            parts = [data(r, 0 if r == ranks - 1 > 0 else r + 1, masked) for r in range(ranks)]
            gaps[f"{kind}, masked {masked}"] = gap(kind, parts)
    return gaps


def collectives(rank: int) -> float:
    """How many all-reduces more or fewer than one per group a forward makes, with tokens and without."""
    world, exact, calls = dist.group.WORLD, dist.all_reduce, []

    def counting(t: Tensor, **kw: object) -> object:
        calls.append(t.numel())
        return exact(t, **kw)

    dist.all_reduce = counting
    try:
        router = make("softmax")
        router.losses(router(torch.zeros(rank, D, dtype=torch.float64), batch=1))
        router.groups = LossGroups(batch=world, sequence=world)
        router.losses(router(torch.zeros(2 * rank, D, dtype=torch.float64), batch=2))
    finally:
        dist.all_reduce = exact
    return 0.0 if calls == [2 * E + 3, 2 * E, 2 * E + 3] else float(len(calls)) + 1
