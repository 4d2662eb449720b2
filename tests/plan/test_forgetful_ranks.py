"""Layers of one's own on real ranks under an allocator's hook, and their plans; and plans that forget something.

Legend: T tokens of a rank, D model dim, E experts, K experts per token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from helpers.ranks import run_ranks
from plan.hooked import Heap, compiled_hook, under
from plan.test_one_rank import peak_of
from plan.test_planned_loops import routed
from plan.test_worlds import RANKS, Block, by_experts, split
from trimtab.dispatch.planned import planned
from trimtab.plan.ledger import Ledger, Storage
from trimtab.plan.stages import Stages, Step, measure
from trimtab.plan.traffic import SKEWS, Traffic, draw
from trimtab.plan.without_values import World

SHARE, MORE = 0.03, 20_000_000
"""How far a plan may be off: of the allocator's bytes, and what Python, PyTorch and Gloo take beside tensors."""


class Model(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def gathered(model: Any, transport: str) -> None:
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))


WAYS: dict[str, tuple[Callable[[nn.Module, str], None], int, tuple[int, int, int], int]] = {
    "exchange": (by_experts, 1, (512, 64, 8), 8192),
    "skewed": (by_experts, 1, (512, 64, 8), 2048),
    "etp": (split, 2, (512, 128, 8), 4096),
    "prefetch": (gathered, 3, (512, 768, 16), 64),
}
"""How a model is spread; layers; D, the experts' hidden dim and E; T."""


def built(way: str, device: str, transport: str) -> tuple[Any, Step]:
    spread, layers, sizes, tokens = WAYS[way]
    with torch.device(device):
        model = Model(Block(*sizes, dense=False) for _ in range(layers))
    spread(model, transport)
    return model, Step(
        loss=lambda: model(torch.randn(tokens, sizes[0], requires_grad=True)).sum(),
        optimizer=lambda: torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
    )


def plan_of(way: str, skew: str, ranks: int = RANKS) -> Stages:
    """Of the busiest rank."""
    with World(ranks) as world, planned(Traffic(skew=skew), rounds=True, bounds=skew == "worst"):
        model, step = built(way, "meta", "planned")
        world.fill(model)
        return measure(model, step, world)


def held_on_rank(cases: list[tuple[str, str]]) -> list[int]:
    """The most bytes in malloc and mmap of this rank's second step, over those before its model, of ways and skews."""
    torch.set_num_threads(1)
    heap, found = Heap(), []
    for way, skew in cases:
        for _ in range(2):  # libraries keep buffers of their own from the first on
            before = heap.now()
            model, step = built(way, "cpu", "alltoall")
            (*_, experts), tokens = WAYS[way][2:]
            for block in model:
                at = block.moe.dispatcher.transport
                place = {} if at is None else {"rank": at.rank, "ranks": at.size}
                ids_TK = draw(skew, tokens, 2, experts, **place)
                block.moe.dispatcher._dispatch = partial(routed, block.moe.dispatcher._dispatch, ids_TK)
            most = heap.most(step) - before
            del model, step, block, at
        found.append(most)
    return found


def second_buffers(ledger: Ledger) -> set[Storage]:
    """What travels beside something that travels."""
    all = [s for s in ledger.storages if s.known == "exchange"]
    return {s for s in all if any(o.born < s.born and (o.died is None or s.born < o.died) for o in all)}


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
def test_plans_are_what_the_allocators_of_ranks_count_and_forgetful_ones_are_off(tmp_path: Path) -> None:
    cases = [(way, "balanced") for way in WAYS]
    told = under(compiled_hook(tmp_path), run_ranks, held_on_rank, RANKS, cases, deadline=240.0)
    most = [max(rank[i] for rank in told) for i in range(len(cases))]
    for (way, skew), held in zip(cases, most, strict=True):
        plan, off = plan_of(way, skew), SHARE * held + MORE
        _, peak = plan.peak
        print(f"{way}: run {held}, plan {peak / held - 1:+.2%}")
        assert abs(peak - held) <= off
        if way == "exchange":
            assert plan.ledger is not None
            forgotten = second_buffers(plan.ledger)
            assert abs(peak_of(s for s in plan.ledger.storages if s not in forgotten) - held) > off
        if way == "prefetch":
            with patch.object(FSDPParamGroup, "_backward_prefetch", lambda self: None):
                assert abs(plan_of(way, skew).peak[1] - held) > off


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
def test_worst_is_never_less_than_what_allocators_count(tmp_path: Path) -> None:
    cases = [("skewed", skew) for skew in SKEWS[2:]]
    told = under(compiled_hook(tmp_path), run_ranks, held_on_rank, 2, cases, deadline=240.0)
    assert max(map(max, told)) <= plan_of("skewed", "worst", 2).peak[1]
    assert plan_of("exchange", "hot_rank").peak[1] <= plan_of("exchange", "worst").peak[1], "of what waits in a pool"
