"""Capacity against counting in Python: who stays, and padding that fills exactly."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.routing.capacity import drop_over, padding
from trimtab.routing.config import RouterConfig
from trimtab.routing.select import capacity

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


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 9), st.sampled_from([0.5, 1.0, 1.25, 3.0]), st.integers(1, E), st.integers(0, 10**6))
def test_padding_fills_every_expert(tokens: int, factor: float, k: int, seed: int) -> None:
    config = RouterConfig(num_experts=E, top_k=k, capacity_factor=factor, pad=True)
    room = capacity(tokens, config)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, E, (tokens, k), generator=g)
    ids = drop_over(ids, torch.rand(tokens, k, generator=g), E, room, "probability")
    full = torch.cat((ids, padding(ids, config, room)), dim=1)
    assert ((full >= -1) & (full < E)).all()
    counts = torch.bincount(full[full >= 0], minlength=E)
    assert (counts <= room).all()
    if tokens >= E or tokens == 0:
        assert counts.tolist() == [room] * E
