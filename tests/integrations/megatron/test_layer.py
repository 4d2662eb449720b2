"""Megatron's MoE layer with our exchange, before Megatron's experts and ours: outputs and every gradient are the dense
truth of all ranks, however the tokens fall.

The edges are those at which Megatron's own dispatchers or router fail, see docs/peers.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.megatron_case import Case, check, input_of, layer_of, of_kinds
from helpers.megatron_cpu import megatron_ranks, parallel_state
from trimtab.errors import InputError
from trimtab.integrations.megatron.dispatcher import slots_of

EDGES = {
    "balanced": Case(tokens=[(6, 2)]),
    "uneven": Case(tokens=[(6, 2), (3, 1), (1, 1), (5, 3)]),
    "no tokens on the last": Case(tokens=[(6, 2), (5, 1), (4, 1), (0, 2)]),
    "no tokens on the first": Case(tokens=[(0, 1), (6, 2), (2, 1), (3, 1)]),
    "no sequences": Case(tokens=[(4, 0), (6, 2)]),
    "no tokens anywhere": Case(tokens=[(0, 1)]),
    "one token in the world": Case(tokens=[(0, 1), (1, 1), (0, 1), (0, 1)], spread=0.3),
    "everything to one expert": Case(tokens=[(6, 2), (3, 1)], hot=True),
    "padding": Case(tokens=[(6, 2), (4, 1)], padding=[0.5, 0.25]),
    "padding alone": Case(tokens=[(6, 2), (4, 1)], padding=[0.0, 1.0]),
    "two micro-batches in flight": Case(tokens=[(6, 2), (0, 1), (3, 1)], steps=2),
    "no token of some experts": Case(tokens=[(1, 1), (2, 1)], spread=9.0),
    "fewer than K": Case(tokens=[(6, 2), (5, 1)], options={"moe_expert_capacity_factor": 0.5}),
    "fewer than K, none": Case(tokens=[(6, 2), (0, 1)], options={"moe_expert_capacity_factor": 0.5}),
    "dropped by position": Case(
        tokens=[(6, 2), (5, 1)], options={"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"}
    ),
    "frozen experts": Case(tokens=[(6, 2), (0, 1)], frozen=("experts",)),
    "one rank alone wants gradients": Case(tokens=[(6, 2), (3, 1)], frozen=("experts", "router"), wanted=[True, False]),
    "recomputed": Case(
        tokens=[(6, 2), (0, 1)], steps=2,
        options={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    "activations recomputed": Case(
        tokens=[(6, 2), (3, 1)],
        options={
            "recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True,
        },
    ),
    "ordered": Case(tokens=[(6, 2), (3, 1)], use={"combine": "ordered"}),
    "bf16": Case(tokens=[(6, 2), (3, 1)], dtype=torch.bfloat16, bound=3e-2),
    # Megatron's router has float32 in its softmax
    "fp64": Case(
        tokens=[(6, 2), (3, 1), (0, 1)], dtype=torch.float64, options={"moe_router_dtype": "fp64"}, bound=1e-10,
        use={"router": "trimtab"},
    ),
}  # fmt: skip
SOME = ("uneven", "no tokens on the last")
FOUR = {
    "tp1 ep4": {"ep": 4}, "tp1 ep2 edp2": {"ep": 2}, "tp1 ep2 etp2": {"ep": 2, "etp": 2},
    "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2}, "tp2 ep4 etp1": {"tp": 2, "ep": 4}, "tp1 ep1 etp4": {"etp": 4},
}  # fmt: skip


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.megatron_full)


def over(cases: dict[str, Case], names: Any = EDGES, **sizes: int) -> dict[str, Case]:
    return {name: replace(cases[name], sizes=sizes) for name in names}


def test_one_rank() -> None:
    names = [name for name in EDGES if "one rank alone" not in name and name != "one token in the world"]
    check(of_kinds(over(EDGES, names)), 1)


def test_two_ranks() -> None:
    check(of_kinds(over(EDGES, ep=2)), 2)


@pytest.mark.parametrize(("sizes", "names"), [("tp1 ep2 etp2", SOME), *(full(sizes, EDGES) for sizes in FOUR)])
def test_four_ranks(sizes: str, names: Any) -> None:
    check(of_kinds(over(EDGES, names, **FOUR[sizes])), 4, deadline=200)


@pytest.mark.parametrize("transport", ["shared_memory", full("allgather"), full("auto")])
def test_transports_by_name(transport: str) -> None:
    cases = {name: replace(case, use={"transport": transport}) for name, case in EDGES.items()}
    check(of_kinds(over(cases, SOME, ep=2)), 2)


def test_ids_come_of_the_map_whatever_the_probabilities() -> None:
    routing_map = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool)
    probs = torch.tensor([[9.0, 0.0, 0.5, 9.0], [9.0, 9.0, 9.0, 0.25], [9.0] * 4, [0.1] * 4]).requires_grad_()
    ids, w = slots_of(routing_map, probs, 2)
    assert ids.tolist() == [[1, 2], [3, -1], [-1, -1], [4, 4]]  # one of more than K names an expert that is none
    assert w[:3].tolist() == [[0.0, 0.5], [0.25, 0.0], [0.0, 0.0]]
    w[:3].sum().backward()
    assert torch.equal(probs.grad[:3], routing_map[:3].float())  # an expert chosen with 0 has a gradient
    assert slots_of(routing_map[:0], probs[:0], 2)[0].shape == (0, 2)


def too_many() -> str:
    case = Case(tokens=[(6, 2)], sizes={"ep": 2})
    layer = layer_of(case)
    if parallel_state.get_expert_model_parallel_rank() == 1:
        layer.router.register_forward_hook(lambda module, given, out: (out[0], torch.ones_like(out[1])))
    with pytest.raises(InputError) as caught:
        layer(input_of(case, 0, 0).x_SBH)
    return str(caught.value)


def test_more_than_k_experts_of_a_token_raise_on_every_rank() -> None:
    for said in megatron_ranks(too_many, 2, ep=2):
        assert "rank 1" in said
        assert "layer (unnamed 0)" in said
