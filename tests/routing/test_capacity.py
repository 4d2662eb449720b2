"""Capacity against counting in Python: who stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimtab.integrations.transformers.routers.observe import replay
from trimtab.routing.config import RouterConfig
from trimtab.routing.recompute import replay_in_recompute
from trimtab.routing.replay import Decisions
from trimtab.routing.select import drop_over

E = 4


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.tuples(st.integers(-1, E - 1), st.integers(0, 3)), min_size=2, max_size=2), max_size=8),
    st.integers(0, 5),
    st.sampled_from(["probability", "position"]),
)
def test_the_right_slots_stay(rows: list[list[tuple[int, int]]], room: int, by: str) -> None:
    ids = torch.tensor([[e for e, _ in row] for row in rows], dtype=torch.int64).view(-1, 2)
    weights = torch.tensor([[w for _, w in row] for row in rows], dtype=torch.float32).view(-1, 2)
    flat, heavy = ids.flatten().tolist(), weights.flatten().tolist()
    expected = list(flat)
    for e in range(E):
        slots = [n for n, i in enumerate(flat) if i == e]
        if by == "probability":
            slots.sort(key=lambda n: (-heavy[n], n))
        for n in slots[room:]:
            expected[n] = -1
    assert drop_over(ids, weights, E, room, by).flatten().tolist() == expected


@pytest.mark.parametrize("tokens", [0, 1, 3, 50])
@pytest.mark.parametrize(
    "options",
    [
        {"select": "expert_choice"},
        {"select": "expert_choice", "capacity_factor": 9.0},
        {"capacity_factor": 0.6},
        {"capacity_factor": 5.0},
    ],
    ids=str,
)
def test_no_more_slots_are_kept_than_it_says(options: dict[str, Any], tokens: int) -> None:
    router = RouterConfig(num_experts=E, top_k=2, **options).build(8)
    x = torch.randn(tokens, 8)
    routing = router(x)
    assert routing.most_slots is not None
    assert (routing.ids_TK >= 0).sum() <= routing.most_slots <= routing.ids_TK.numel()
    if options == {"select": "expert_choice"} and tokens > 1:
        assert (routing.ids_TK >= 0).sum() == routing.most_slots


def test_of_slots_that_are_given_nothing_is_said() -> None:
    """They may be more than a capacity allows, and are again where a checkpoint runs the layer again after `replay`."""
    everything = torch.arange(E).expand(5, E)
    router = RouterConfig(num_experts=E, top_k=2, select="expert_choice").build(8)
    said = []

    def run(x: Tensor) -> Tensor:
        routing = router(x)
        said.append((routing.most_slots, int((routing.ids_TK >= 0).sum())))
        return routing.weights_TK.square().sum()

    assert router(torch.randn(5, 8), ids_TK=everything).most_slots is None
    decisions = Decisions(ids=everything.view(1, 5, 1, E), num_experts=E, layers=("",))
    with replay(router, decisions):
        y = checkpoint(run, torch.randn(5, 8), use_reentrant=False, context_fn=replay_in_recompute)
    y.backward()
    assert said == [(None, 5 * E)] * 2
