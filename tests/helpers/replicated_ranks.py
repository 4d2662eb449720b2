"""A layer with replicated experts on real ranks, however the tokens fall, against the oracle over all ranks' tokens.

Legend: P ranks, E experts, e at home on each, T tokens of a rank, K experts per token, D model dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import trimtab
from helpers import cases
from helpers.comparing import gradients, relative_error
from helpers.layer_case import D, slope, truth
from helpers.ranks import packed, unpacked
from trimtab.dispatch.dispatcher import COMBINE_MODES
from trimtab.moe import MoE, MoEConfig
from trimtab.routing.config import RouterConfig

E, F, K = 8, 12, 3
PATTERNS = (*cases.PATTERNS, "balanced", "last_rank", "one_slot")
WAYS = ("plain", "recompute", "routed again", "reentrant")
"""How a layer is run. routed again: recomputed without `replay_in_recompute`, so that all is decided twice."""
Given = tuple[Tensor, Tensor, Tensor | None]
"""x, ids, mask of one rank."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """One pattern's truth: of each rank y, dx and the router's gradient, and the experts' of all, by name."""

    y: list[Tensor]
    dx: list[Tensor]
    router: list[Tensor]
    experts: dict[str, Tensor]


def given(pattern: str, rank: int, ranks: int) -> Given:
    known = pattern if pattern in cases.PATTERNS else "ragged" if pattern == "last_rank" else "random"
    x, ids, _, mask = cases.case(known, rank, ranks, E, K, D, torch.float64, PATTERNS.index(pattern))
    if pattern == "balanced":
        ids = (torch.arange(ids.numel()).view_as(ids) + rank) % E
    elif pattern == "last_rank":  # whose tokens are the most, too
        ids = E - 1 - ids % (E // ranks)
    elif pattern == "one_slot":
        ids = torch.full_like(ids, -1)
        if rank == 0:
            ids[3, 1] = E - 2
    return x, ids, mask


def build(layer: str, **more: Any) -> MoE:
    """The same values on every rank."""
    torch.manual_seed(4)
    router = RouterConfig(num_experts=E, top_k=K)
    config = {"dim": D, "hidden": F, "router": router, "dtype": torch.float64, "bias": True} | more
    return MoEConfig(**config).build(layer)


def solve(patterns: Sequence[str], ranks: int, **more: Any) -> bytes:
    """By pattern, for `too_far_on_rank`."""
    moe, found = build("truth", **more), {}
    for pattern in patterns:
        p = {name: param.detach().double().requires_grad_() for name, param in moe.named_parameters()}
        ys, xs, routers, total = [], [], [], torch.zeros((), dtype=torch.float64)
        for rank in range(ranks):
            x, ids, mask = given(pattern, rank, ranks)
            x = x if mask is None else x.masked_fill(~mask[:, None], 0)
            xs.append(x.requires_grad_())
            own = p | {"router.weight": p["router.weight"].detach().requires_grad_()}
            ys.append(truth(moe, own, xs[-1], ids, mask))
            routers.append(own["router.weight"])
            total = total + (ys[-1] * slope(ys[-1])).sum()
        names = [name for name in p if name.startswith("experts.")]
        leaves = [*xs, *routers, *(p[name] for name in names)]
        grads = iter(gradients(total, leaves, torch.ones(())))
        found[pattern] = Solved(
            y=[y.detach() for y in ys], dx=[next(grads) for _ in xs], router=[next(grads) for _ in routers],
            experts=dict(zip(names, grads, strict=True)),
        )  # fmt: skip
    return packed(found)


def run(way: str, moe: MoE, x: Tensor, **more: Any) -> Tensor:
    def layer(x: Tensor) -> Tensor:
        return moe(x, **more).y * 1.0  # so that what is recomputed does not end with the layer

    if way == "plain":
        return layer(x)
    options: dict[str, Any] = {"context_fn": trimtab.replay_in_recompute} if way == "recompute" else {}
    y: Tensor = checkpoint(layer, x, use_reentrant=way == "reentrant", **options)
    return y


def step(moe: MoE, way: str, pattern: str) -> dict[str, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, ids, mask = given(pattern, rank, ranks)
    moe.zero_grad()
    y = run(way, moe, x.requires_grad_(), ids=ids, token_mask=mask)
    (y * slope(y)).sum().backward()
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    for name, param in moe.named_parameters():
        assert param.grad is not None, name
        found[name] = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
    return found


def compare(found: dict[str, Tensor], true: Solved) -> dict[str, float]:
    rank, e = dist.get_rank(), E // dist.get_world_size()
    wanted = {"y": true.y[rank], "dx": true.dx[rank], "router.weight": true.router[rank]}
    wanted |= {name: grad[rank * e : rank * e + e] for name, grad in true.experts.items()}
    assert wanted.keys() == found.keys()
    return {name: relative_error(found[name], value) for name, value in wanted.items()}


def too_far_on_rank(
    solved: bytes, transports: Sequence[str], ways: Sequence[str], tolerances: Sequence[Any]
) -> tuple[dict[str, float], int]:
    """What is off by more than 1e-12, and how many replicas this rank was sent in all."""
    mesh, bad, replicas = init_device_mesh("cpu", (dist.get_world_size(),)), {}, 0
    truths: dict[str, Solved] = unpacked(solved)
    for transport, combine, tolerance in itertools.product(transports, COMBINE_MODES, tolerances):
        moe = build("moe")
        style = trimtab.ExpertParallel(transport=transport, combine=combine, replicate_experts=tolerance, copy_cost=0)
        trimtab.parallelize(moe, mesh, {"": style})
        for way, (pattern, true) in itertools.product(ways, truths.items()):
            for name, error in compare(step(moe, way, pattern), true).items():
                if not error <= 1e-12:
                    bad[f"{transport} {combine} {tolerance} {way} {pattern} {name}"] = error
            assert moe.dispatcher.replicated is not None
            replicas += int(moe.dispatcher.replicated.replicas_P[dist.get_rank()])
            loads = moe.dispatcher.replicated.loads_after_P
            if not isinstance(tolerance, str):
                assert int(loads.max()) <= -(-int(loads.sum()) // len(loads)) * (1 + tolerance)
    return bad, replicas
