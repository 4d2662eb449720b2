"""A transport whose counts are given: what is given for drawn ids is what real ranks count, and rows come accordingly.

Legend: P ranks, E experts, T tokens of a rank, K experts per token, D model dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from helpers.ranks import run_ranks
from trimtab import AllToAll, Dispatcher, ExpertParallel, MoEConfig, RouterConfig, parallelize
from trimtab.dispatch import facts
from trimtab.dispatch.options import ExchangeOptions
from trimtab.dispatch.planned import Call, planned
from trimtab.dispatch.transport import Handshake
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.plan.traffic import SKEWS, Traffic, draw
from trimtab.plan.without_values import World

P, E, T, K, D = 4, 16, 40, 3, 8
COLUMNS = facts.ROWS, facts.SLOTS, facts.REPLICAS, facts.REPLICA_SLOTS
DRAWN = [skew for skew in SKEWS if skew not in ("even", "worst")]
RULES: tuple[Any, ...] = ("off", "auto", 0.1)


def counted_on_rank() -> dict[tuple[str, str], list[list[list[int]]]]:
    """What the handshake of each workload tells this rank: the columns of what it sends, and of what it receives."""
    found, rank = {}, dist.get_rank()
    for rule in RULES:
        replication = ExchangeOptions(replicate_experts=rule, copy_cost=1).replication
        for skew in DRAWN:
            transport = AllToAll(dist.group.WORLD)
            dispatcher, met = Dispatcher(E, transport, replication=replication), list[Handshake]()

            def handshake(message: Any, own: Any = transport.handshake, met: Any = met) -> Handshake:
                met.append(own(message))
                return met[-1]

            transport.handshake = handshake  # type: ignore[method-assign]
            ids_TK = draw(skew, T, K, E, rank=rank, ranks=P)
            dispatcher.dispatch(torch.randn(T, D), ids_TK, torch.rand(T, K))
            count = next(m for m in met if m.sent[0][facts.MOVEMENT] == 0)
            found[skew, str(rule)] = [[[r[c] for r in rows] for c in COLUMNS] for rows in (count.sent, count.received)]
    return found


def test_traffic_of_drawn_ids_is_what_real_ranks_count() -> None:
    for rank, found in enumerate(run_ranks(counted_on_rank, P)):
        for rule in RULES:
            replication = ExchangeOptions(replicate_experts=rule, copy_cost=1).replication
            for skew in DRAWN:
                call = Call(tokens=T, top_k=K, experts=E, rank=rank, ranks=P)
                given = Traffic(skew=skew, rank=rank, replication=replication)(call)
                both = [[list(n) or [0] * P for n in moved] for moved in given]
                assert both == found[skew, str(rule)], (skew, rule, rank)


def run_planned(traffic: Any, options: dict[str, Any]) -> list[tuple[int, ...]]:
    """On rank 0 of P that are not there, without values: shapes of the rows that its experts get."""
    shapes: list[tuple[int, ...]] = []
    with World(P), planned(traffic), torch.device("meta"):
        moe = MoEConfig(dim=D, hidden=8, router=RouterConfig(num_experts=E, top_k=K)).build()
        parallelize(moe, init_device_mesh("cpu", (P,)), {"": ExpertParallel(transport="planned", **options)})
        moe.experts.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
        for _ in range(2):
            x_TD = torch.randn(T, D, requires_grad=True)
            moe(x_TD).y.sum().backward()
            assert x_TD.grad is not None
            assert all(p.grad is not None and p.grad.shape == p.shape for p in moe.parameters())
    return shapes


@pytest.mark.parametrize("options", [{}, {"combine": "ordered"}, {"replicate_experts": 0.1}], ids=str)
@pytest.mark.parametrize("skew", ["even", "worst", "hot_rank"])
def test_rows_come_as_they_are_given(skew: str, options: dict[str, Any]) -> None:
    traffic = Traffic(skew=skew, replication=ExchangeOptions(**options).replication)
    _, received = traffic(Call(tokens=T, top_k=K, experts=E, rank=0, ranks=P))
    n = sum(received.slots if "combine" in options else received.rows)
    assert run_planned(traffic, options) == [(n, D)] * 2
    if skew == "worst" and not options:
        assert n == P * T
    assert "planned" not in TRANSPORTS


@pytest.mark.parametrize("rule", RULES)
def test_worst_is_never_less_than_any_workload(rule: Any) -> None:
    replication = ExchangeOptions(replicate_experts=rule, copy_cost=1).replication
    for top_k, experts, ranks in ((3, 16, 4), (8, 16, 8), (2, 8, 2), (4, 8, 8)):
        call = partial(Call, T, top_k, experts, ranks=ranks)
        worst = Traffic(skew="worst", replication=replication)(call(rank=0))
        for skew in DRAWN:
            for rank in range(ranks):
                moved = Traffic(skew=skew, rank=rank, replication=replication)(call(rank=rank))
                for bounds, own in zip(worst, moved, strict=True):
                    for bound, number in zip(bounds[:3], own[:3], strict=True):
                        assert sum(number) <= sum(bound), (skew, rank, top_k, experts, ranks)
