"""Balance losses on real ranks: uneven tokens, none on one rank, masks, sequences cut, micro-batches of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.router_truth import truth_losses
from trimtab.layout import shard_cuts
from trimtab.routing.balance import set_totals
from trimtab.routing.config import RouterConfig
from trimtab.routing.losses import LossGroups
from trimtab.routing.router import Router

D, E, K = 8, 6, 2
COEFFICIENTS = {"aux": 0.5, "sequence_aux": 0.25, "global_aux": 2.0, "z": 0.125}
NAMES = tuple(COEFFICIENTS)
KINDS = ("softmax", "sigmoid", "sqrtsoftplus")


def make(kind: str) -> Router:
    c = RouterConfig(
        num_experts=E, top_k=K, score=kind, aux_loss=0.5, sequence_aux_loss=0.25, global_aux_loss=2.0, z_loss=0.125
    )
    router = Router(c, D, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.randn(E, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    return router


def data(seed: int, batch: int, length: int, masked: float) -> tuple[Tensor, Tensor]:
    """(x [B, L, D], mask [B, L]); what the mask hides is NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, D, generator=g, dtype=torch.float64)
    mask = torch.rand(batch, length, generator=g) >= masked
    return x.masked_fill(~mask[..., None], float("nan")), mask


def truth(
    kind: str, parts: list[tuple[Tensor, Tensor]], names: Sequence[str] = NAMES, total: int | None = None
) -> tuple[dict[str, float], Tensor]:
    """Losses and weight gradient of one process: parts [b, l, D] put together as sequences of one batch.

    total: tokens of the step, of which these are a part.
    """
    router = make(kind)
    weight = router.weight.detach().clone().requires_grad_()
    x, mask = (torch.cat([p[i].flatten(0, 1) for p in parts]) for i in (0, 1))
    logits, ids = x.nan_to_num(0) @ weight.T, router(x, token_mask_T=mask).ids_TK
    share = 1.0 if total is None else int(mask.sum()) / total
    found = truth_losses(logits, ids, mask, sum(p[0].shape[0] for p in parts), router.config)
    losses = {name: found[name] * COEFFICIENTS[name] * share for name in names}
    (grad,) = torch.autograd.grad(sum(losses.values()), weight)
    return {name: float(loss.detach()) for name, loss in losses.items()}, grad


def gap(ours: dict[str, Tensor], grad: Tensor, true: dict[str, float], true_grad: Tensor) -> float:
    """The largest difference; NaN where there is one, for torch's maximum does not lose it."""
    values = torch.stack([ours[name].detach() - true[name] for name in COEFFICIENTS])
    return float(torch.cat([values, (grad - true_grad).flatten()]).abs().max())


def mean_grad(router: Router, total: Tensor) -> Tensor:
    """The weight's gradient, averaged over the ranks as DDP and FSDP average."""
    (grad,) = torch.autograd.grad(total, router.weight)
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def on_ranks() -> dict[str, float]:
    """Largest difference to one process, by case."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    gaps = {}
    for kind in KINDS:
        # Whole sequences of one length, another number of them on each rank: none on the last of several.
        for masked in (0.0, 0.5, 1.0):
            everyone = [data(r, 0 if r == ranks - 1 > 0 else r + 1, 5, masked) for r in range(ranks)]
            x, mask = everyone[rank]
            router = make(kind)
            router.groups = LossGroups(batch=world)
            losses = router.losses(router(x.flatten(0, 1), token_mask_T=mask.flatten(), batch=x.shape[0]))
            grad = mean_grad(router, sum(losses.values()))
            gaps[f"{kind} whole sequences, masked {masked}"] = gap(losses, grad, *truth(kind, everyone))
        # Every sequence cut over the ranks, unevenly; positions fewer than ranks leave some rank without.
        for length in (1, 7):
            x, mask = data(31, 3, length, 0.3)
            cuts = shard_cuts(length, ranks)
            mine = slice(cuts[rank], cuts[rank + 1])
            router = make(kind)
            router.groups = LossGroups(sequence=world)
            losses = router.losses(router(x[:, mine].flatten(0, 1), token_mask_T=mask[:, mine].flatten(), batch=3))
            grad = mean_grad(router, sum(losses.values()))
            gaps[f"{kind} cut sequences of {length}"] = gap(losses, grad, *truth(kind, [(x, mask)]))
    gaps |= accumulated(rank, ranks) | {"collectives": collectives(rank)}
    if ranks == 4:
        gaps |= both_ways(rank)
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
        router.groups = LossGroups(batch=world)
        router.losses(router(torch.zeros(rank, D, dtype=torch.float64), batch=1))
        router.groups = LossGroups(batch=world, sequence=world)
        router.losses(router(torch.zeros(2 * rank, D, dtype=torch.float64), batch=2))
    finally:
        dist.all_reduce = exact
    return 0.0 if calls == [2 * E + 3, 2 * E, 2 * E + 3] else float(len(calls)) + 1


def accumulated(rank: int, ranks: int) -> dict[str, float]:
    """Three micro-batches of different sizes: with the step's totals, their sum is one process's over all of them."""
    steps = [[data(100 * m + r, (r + m) % 3, 5, 0.4) for r in range(ranks)] for m in range(3)]
    flat = [part for step in steps for part in step]
    total = sum(int(mask.sum()) for _, mask in flat)
    router = make("sigmoid")
    x, mask = (torch.cat([part[i].flatten(0, 1) for part in flat]) for i in (0, 1))
    ids = make("sigmoid")(x, token_mask_T=mask).ids_TK
    counts = torch.bincount(ids[ids >= 0], minlength=E)
    router.groups = LossGroups(batch=dist.group.WORLD)
    set_totals(router, total, {"": counts})
    outs = []
    for step in steps:
        x, mask = step[rank]
        outs.append(router.losses(router(x.flatten(0, 1), token_mask_T=mask.flatten(), batch=x.shape[0])))
    summed = {name: torch.stack([out[name] for out in outs]).sum() for name in COEFFICIENTS}
    grad = mean_grad(router, sum(summed.values()))
    # aux is per micro-batch, weighted by its tokens; the others are those of one big batch.
    true, true_grad = truth("sigmoid", flat, ("sequence_aux", "global_aux", "z"))
    each = [truth("sigmoid", step, ("aux",), total) for step in steps]
    true |= {"aux": sum(values["aux"] for values, _ in each)}
    return {"accumulated": gap(summed, grad, true, true_grad + sum(g for _, g in each))}


def both_ways(rank: int) -> dict[str, float]:
    """Two data-parallel halves of two sequence-parallel ranks; gradients summed within a half, averaged over halves."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    parts = [data(7, 2, 5, 0.3), data(8, 2, 5, 0.6)]
    x, mask = parts[rank // 2]
    mine = slice(0, 2) if rank % 2 == 0 else slice(2, 5)
    router = make("softmax")
    router.groups = LossGroups(batch=dist.group.WORLD, sequence=halves[rank // 2], divisor=2)
    losses = router.losses(router(x[:, mine].flatten(0, 1), token_mask_T=mask[:, mine].flatten(), batch=2))
    grad = 2 * mean_grad(router, sum(losses.values()))  # a sum over 2 x 2 ranks, divided by the 2 halves
    return {"cut and whole": gap(losses, grad, *truth("softmax", parts))}
