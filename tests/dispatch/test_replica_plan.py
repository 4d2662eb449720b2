"""The plan of replicated experts: equal to plain loops, within its bounds, made without a value read.

Legend: P ranks, E experts, T tokens, K experts per token.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuzz.replication import KINDS, check_plan, plan_case
from helpers.replica_plan_loops import alias_table, candidates, surplus_to_room
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replica_plan import physical_ids, replica_plan, slot_shares

AUTO = ReplicationConfig(copy_cost=20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_that_of_plain_loops_and_keeps_what_it_promises(kind: str) -> None:
    """A few of the 10,000 draws of `python -m fuzz.replication 10000`."""
    for index in range(list(KINDS).index(kind), 600, len(KINDS)):
        case = plan_case(0, index)
        assert not check_plan(case), f"{kind}, case 0:{index}"


def test_the_draws_reach_every_way_and_most_caps() -> None:
    ways: Counter[str] = Counter()
    caps = set()
    for index in range(480):
        case = plan_case(0, index, most_ranks=8, most_experts=32)
        loads, ranks = case.counts_HPE.sum((0, 1)).tolist(), case.counts_HPE.shape[1]
        cap = int(replica_plan(case.counts_HPE, case.config).cap)
        if case.config.tolerance is None:
            caps.add([one.cap for one in candidates(loads, ranks, None, 0)].index(cap))
        moves, alias = surplus_to_room(loads, ranks, cap), alias_table(loads, ranks, cap)
        most = max(Counter(rank for _, rank in moves).values(), default=0)
        ways["alias" if most > len(loads) // ranks else "surplus" if moves != alias else "either"] += 1
    assert min(ways.values()) > 20, ways
    assert len(caps) >= 8, caps


def of_rank_1(counts_HPE: Tensor, ids_TK: Tensor) -> tuple[Tensor, ...]:
    plan = replica_plan(counts_HPE, AUTO)
    cells_EP = slot_shares(plan, counts_HPE, 0, 1)
    ids = physical_ids(ids_TK, cells_EP, plan)
    return plan.slots_EP, plan.place_EP, plan.replicas_PP, plan.cap, plan.checksum, plan.loads_after_P, cells_EP, ids


def counted(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Counts of 4 ranks, many of them 0, and the slots of rank 1."""
    counts = torch.randint(0, 60, (1, 4, 12), generator=g) * torch.randint(0, 2, (4, 12), generator=g)
    ids = torch.randint(-1, 12, (50, 2), generator=g).int()
    counts[0, 1] = torch.bincount(ids[ids >= 0], minlength=12)
    return counts, ids


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_no_value_is_read(tracing: str) -> None:
    """What was traced with one routing is the plan of any other, and fake tensors, which have no values, do."""
    g = torch.Generator().manual_seed(0)
    given = counted(g)
    with FakeTensorMode() as mode:
        fake = of_rank_1(*map(mode.from_tensor, given))
    meta = of_rank_1(*(t.to("meta") for t in counted(g)))
    graph = make_fx(of_rank_1, tracing_mode=tracing)(*counted(g))
    for _ in range(10):
        given = counted(g)
        real = of_rank_1(*given)
        assert all(map(torch.equal, graph(*given), real))
        assert [t.shape for t in real] == [t.shape for t in meta] == [t.shape for t in fake]


def test_the_checksum_tells_counts_and_plans_apart() -> None:
    counts = torch.randint(5, 50, (2, 4, 12), generator=torch.Generator().manual_seed(0))
    sums = {int(replica_plan(counts, ReplicationConfig(tolerance=t, copy_cost=0)).checksum) for t in (0, 0.01, 0.5)}
    for swapped in ((0, 1, 3), (1, 2, 11)):
        h, rank, expert = swapped
        other = counts.clone()
        other[h, rank, expert] += 1
        other[h, rank - 1, expert] -= 1  # the same loads, from other sources
        sums.add(int(replica_plan(other, ReplicationConfig(tolerance=0, copy_cost=0)).checksum))
    assert len(sums) == 5
    assert int(replica_plan(counts, AUTO).checksum) == int(replica_plan(counts.clone(), AUTO).checksum)


def test_ids_of_one_rank_alone_and_of_no_tokens() -> None:
    counts = torch.tensor([[[2, 0, 1]]])
    plan = replica_plan(counts, AUTO)
    ids = torch.tensor([[2, -1], [0, 0]])
    assert torch.equal(physical_ids(ids, slot_shares(plan, counts, 0, 0), plan), ids)
    nothing = torch.zeros(1, 2, 4, dtype=torch.int64)
    plan = replica_plan(nothing, AUTO)
    assert physical_ids(ids[:0], slot_shares(plan, nothing, 0, 1), plan).shape == (0, 2)
    assert int(plan.cap) == int(plan.replicas_PP.sum()) == 0
