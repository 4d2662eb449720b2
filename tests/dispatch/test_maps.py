"""<P x, y> = <x, P^T y> in float64, for each stage alone and for the whole, over drawn traffic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.dispatch.plan import RankPlan, plan_ranks, sort_by_rank
from trimtab.dispatch.transport import Handshake
from trimtab.experts.plan import plan_experts
from trimtab.kernels.rows import combine_rows, gather_rows
from trimtab.layout import ALIGNMENTS

D = 3


@dataclass
class World:
    """All ranks' plans for one call, and what each would send to each."""

    plans: list[RankPlan]
    headers: list[Handshake]


def connect(ids_by_rank: list[Tensor], num_experts: int) -> World:
    """SpreadRanks of every rank for its ids [T, K]; header columns are (rows, slots)."""
    ranks = len(ids_by_rank)
    sorts = [sort_by_rank(ids, num_experts // ranks, ranks) for ids in ids_by_rank]
    everyone = [torch.stack((s.rows_P, s.slots_P), 1).tolist() for s in sorts]
    headers = [
        Handshake(sent=everyone[r], received=[row[r] for row in everyone], everyone=everyone) for r in range(ranks)
    ]
    plans = [plan_ranks(s, int(s.rows_P.sum()), int(s.slots_P.sum())) for s in sorts]
    return World(plans=plans, headers=headers)


def move(rows_by_rank: list[Tensor], world: World, column: int, back: bool = False) -> list[Tensor]:
    """The exchange: each rank's rows, grouped by destination, to all destinations, grouped by source."""
    splits = [h.split_sizes(column) for h in world.headers]
    splits = [split.reversed() if back else split for split in splits]
    parts = [rows.split(split.outgoing) for rows, split in zip(rows_by_rank, splits, strict=True)]
    return [torch.cat([parts[s][d] for s in range(len(parts))]) for d in range(len(parts))]


@st.composite
def traffic(draw: st.DrawFn) -> tuple[int, list[Tensor]]:
    """(E, ids [T, K] of each rank): any T per rank, dropped slots, repeated experts, cold ranks."""
    ranks, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    top_k, num_experts = draw(st.integers(1, 4)), ranks * per_rank
    hot = draw(st.sampled_from([num_experts, 1, per_rank]))  # all experts, one, or one rank's
    slot = st.integers(-1, hot - 1)
    rows = st.lists(st.lists(slot, min_size=top_k, max_size=top_k), max_size=6)
    ids = [torch.tensor(draw(rows), dtype=torch.int32).view(-1, top_k) for _ in range(ranks)]
    return num_experts, ids


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_transposed(px: list[Tensor], y: list[Tensor], x: list[Tensor], pty: list[Tensor]) -> None:
    left = sum(float((a * b).sum()) for a, b in zip(px, y, strict=True))
    right = sum(float((a * b).sum()) for a, b in zip(x, pty, strict=True))
    scale = sum(float((a * b).abs().sum()) for a, b in zip(px, y, strict=True))
    assert abs(left - right) <= 1e-12 * max(scale, 1e-300)


def like(tensors: list[Tensor], seed: int) -> list[Tensor]:
    return [random(*t.shape, seed=seed + i) for i, t in enumerate(tensors)]


@settings(deadline=None, max_examples=300)
@given(traffic())
def test_each_stage_and_the_whole_are_transposed(drawn: tuple[int, list[Tensor]]) -> None:
    num_experts, ids = drawn
    ranks = len(ids)
    e = num_experts // ranks
    world = connect(ids, num_experts)
    x = [random(i.shape[0], D, seed=r) for r, i in enumerate(ids)]

    # SpreadRanks
    sent = [gather_rows(t, plan.row_token_M) for t, plan in zip(x, world.plans, strict=True)]
    dy = like(sent, 10)
    assert_transposed(sent, dy, x, [combine_rows(t, plan.token_csr) for t, plan in zip(dy, world.plans, strict=True)])

    # Exchange
    received = move(sent, world, 0)
    dy = like(received, 20)
    assert_transposed(received, dy, sent, move(dy, world, 0, back=True))

    # SpreadExperts, at every alignment; the ids travel like the tokens
    sent_ids = [i.index_select(0, plan.row_token_M) for i, plan in zip(ids, world.plans, strict=True)]
    local_ids = []
    for r, moved in enumerate(move(sent_ids, world, 0)):
        local_ids.append(torch.where(moved.div(e, rounding_mode="floor") == r, moved - r * e, -1))
    for alignment in ALIGNMENTS:
        for rows, i in zip(received, local_ids, strict=True):
            plan = plan_experts(i, e, alignment=alignment)
            out = torch.where(plan.row_R[:, None] < 0, 0.0, torch.cat((rows, rows.new_zeros(1, D)))[plan.row_R])
            d_out = random(*out.shape, seed=30)
            assert_transposed([out], [d_out], [rows], [combine_rows(d_out, plan.row_csr)])

    # The whole, and the ordered way home: same map, so the same dot product
    plans = [plan_experts(i, e) for i in local_ids]
    expert_rows = [rows[plan.row_R] for rows, plan in zip(received, plans, strict=True)]
    dy = like(expert_rows, 40)
    home = move([combine_rows(t, plan.row_csr) for t, plan in zip(dy, plans, strict=True)], world, 0, back=True)
    whole = [combine_rows(t, plan.token_csr) for t, plan in zip(home, world.plans, strict=True)]
    assert_transposed(expert_rows, dy, x, whole)
    in_slot_order = [t[plan.slot_R.argsort()] for t, plan in zip(dy, plans, strict=True)]
    slots_home = move(in_slot_order, world, 1, back=True)
    ordered = [combine_rows(t, plan.slot_csr) for t, plan in zip(slots_home, world.plans, strict=True)]
    assert_transposed(expert_rows, dy, x, ordered)
    for a, b in zip(whole, ordered, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
