"""With a tolerance, and equal numbers of tokens, the sizes of a call with replicas are known before it is routed.

Legend: P ranks, E experts, e = E / P local ones, T tokens of a rank, K experts per token, D model dim, F hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.replica_bounds import replica_bounds
from helpers.weights import expert_weights
from trimtab import ExpertMLP, oracle
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.plan import plan_ranks, sort_by_rank
from trimtab.dispatch.replica_plan import physical_ids, replica_plan, slot_shares
from trimtab.dispatch.replica_route import experts_to_send
from trimtab.experts.replicated import run_with_replicas
from trimtab.plan.traffic import SKEWS, draw

P, E, T, K, D, F = 4, 8, 24, 3, 8, 16
HOME = E // P
TENTH = ReplicationConfig(tolerance=0.1, copy_cost=0)
BOUNDS = replica_bounds(TENTH, tokens=P * T, top_k=K, num_experts=E, ranks=P)


@dataclass
class AsMany:
    """Replicas as many as there can be, the rest beside those that are there is NaN."""

    replicas: Sequence[Tensor] = ()
    number: int = BOUNDS.replicas
    num_home_slots: int | None = None
    num_slots: int | None = None

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sent = [torch.empty(self.number, *t.shape[1:], dtype=t.dtype).fill_(torch.nan) for t in tensors]
        for t, replicas in zip(sent, self.replicas, strict=False):
            t[: replicas.shape[0]] = replicas
        return sent

    def add_home(self, replicas: Sequence[Tensor], into: Sequence[Tensor], then: Sequence[Tensor] = ()) -> None:
        assert all(copy.shape[0] == self.number for copy in replicas)


def test_the_bounds_by_hand() -> None:
    # 4 ranks x 24 tokens x 3 = 288 slots: 72 on a rank, and 102 of 1024 parts of them.
    assert BOUNDS == (79, 79, 2, 4)
    assert replica_bounds(TENTH, tokens=5, top_k=8, num_experts=64, ranks=8) == (5, 5, 8, 14)
    assert replica_bounds(TENTH, tokens=5, top_k=2, num_experts=4, ranks=1) == (10, 5, 0, 0)
    loose = ReplicationConfig(tolerance=9, copy_cost=0)
    assert replica_bounds(loose, tokens=5, top_k=2, num_experts=4, ranks=2)[:2] == (10, 5)


@pytest.mark.parametrize("way", ["fake", "meta"])
def test_from_counts_to_experts_nothing_is_read_and_every_size_is_the_bound(way: str) -> None:
    saved: list[tuple[int, ...]] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(tuple(t.shape))
        return t

    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode() if way == "fake" else torch.device("meta"))
        experts = ExpertMLP(HOME, D, F)
        ids_TK = torch.zeros(T, K, dtype=torch.int32)
        counts_HPE = torch.zeros(1, P, E, dtype=torch.int64)
        plan = replica_plan(counts_HPE, TENTH)
        places_TK = physical_ids(ids_TK, slot_shares(plan, counts_HPE, 0, 1), plan)
        sent = plan_ranks(sort_by_rank(places_TK, 2 * HOME, P), T * min(K, P), T * K)
        assert sent.row_token_M.shape == (T * min(K, P),)
        assert experts_to_send(plan, 1, HOME, BOUNDS.replicas_sent).shape == (BOUNDS.replicas_sent,)
        x_MD = torch.zeros(BOUNDS.rows, D, requires_grad=True)
        ids_MK, w_MK = torch.zeros(BOUNDS.rows, K, dtype=torch.int32), torch.zeros(BOUNDS.rows, K, requires_grad=True)
        weights = experts.expert_weights()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y_MD = run_with_replicas(experts, weights, x_MD, ids_MK, w_MK, AsMany(), BOUNDS.expert_rows)
        y_MD.sum().backward()
    assert y_MD.shape == (BOUNDS.rows, D)
    assert saved.count((BOUNDS.expert_rows, 2 * F)) == 2, saved  # pre-activations: of the experts at home, of replicas
    assert max(shape[0] for shape in saved if shape) <= max(BOUNDS.expert_rows, BOUNDS.rows) + 1
    assert experts.gate_up.grad.shape == experts.gate_up.shape


@pytest.mark.parametrize("workload", SKEWS[2:])
def test_no_routing_needs_more_and_padded_to_the_bounds_it_has_the_right_numbers(workload: str) -> None:
    g = torch.Generator().manual_seed(0)
    up, down = (torch.randn(E, *shape, dtype=torch.float64, generator=g) for shape in ((2, F, D), (D, F)))
    ids = [draw(workload, T, K, E, rank=rank, ranks=P) for rank in range(P)]
    x_TD, w_TK = (torch.randn(P * T, n, dtype=torch.float64, generator=g) for n in (D, K))
    counts_HPE = torch.stack([torch.bincount(ids_TK.flatten(), minlength=E) for ids_TK in ids])[None]
    plan = replica_plan(counts_HPE, TENTH)
    places_TK = torch.cat(
        [physical_ids(ids_TK, slot_shares(plan, counts_HPE, 0, rank), plan) for rank, ids_TK in enumerate(ids)]
    )
    y_TD = torch.zeros_like(x_TD)
    for rank in range(P):
        here_TK = places_TK // (2 * HOME) == rank
        tokens = here_TK.any(1).nonzero().view(-1)
        copied = (plan.place_EP[:, rank] >= HOME).nonzero().view(-1)
        assert int(here_TK.sum()) <= BOUNDS.expert_rows
        assert tokens.shape[0] <= BOUNDS.rows
        assert copied.shape[0] <= BOUNDS.replicas
        assert int(plan.replicas_PP[rank].sum()) <= BOUNDS.replicas_sent
        x_MD, w_MK = x_TD.new_zeros(BOUNDS.rows, D), w_TK.new_zeros(BOUNDS.rows, K)
        ids_MK = torch.full((BOUNDS.rows, K), -1)
        x_MD[: len(tokens)], w_MK[: len(tokens)] = x_TD[tokens], w_TK[tokens]
        ids_MK[: len(tokens)] = torch.where(here_TK, places_TK - rank * 2 * HOME, -1)[tokens]
        experts = ExpertMLP(HOME, D, F, dtype=torch.float64)
        own = slice(rank * HOME, rank * HOME + HOME)
        weights = expert_weights(up=up[own], down=down[own], up_bias=None, down_bias=None)
        replicas = AsMany((up[copied], down[copied]))
        y_MD = run_with_replicas(experts, weights, x_MD, ids_MK, w_MK, replicas, BOUNDS.expert_rows)
        y_TD.index_add_(0, tokens, y_MD[: len(tokens)])
    truth = oracle.moe(x_TD, torch.cat(ids), w_TK, up, down)
    assert torch.allclose(y_TD, truth, rtol=1e-12, atol=1e-12)
    if workload == "hot_rank":
        assert int(plan.loads_after_P.max()) == BOUNDS.expert_rows
