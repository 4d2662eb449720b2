"""Replicated experts in steps of several micro-batches, in any layout: all that trains has one process's gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.layout_case import Layout, run_plan, solve_all
from helpers.layout_truth import Case
from helpers.ranks import run_ranks
from trimtab.dispatch.transports import TRANSPORTS

FULL, RANKS4 = pytest.mark.replicated_full, pytest.mark.xdist_group("ranks4")
KINDS = [name for name in TRANSPORTS if name != "auto"]


L = Layout
GRID = [Case(batch=1, length=1), Case(batch=3, length=17)]
COLD, STEP = Case(kind="cold", micros=2), Case(micros=2, totals=True)
EDGES = [COLD, STEP, Case(kind="hot", length=5), Case(length=5, masked=True, replayed=True)]
CHOSEN = Case(micros=2, length=5, totals=True, replayed=True)
"""Ids are given: in a narrow type a token near a tie would go elsewhere."""
Plan = list[tuple[Layout, list[Case]]]
TWO: Plan = [
    (L(ep=2, tp=2, tokens="replicated"), GRID + EDGES), (L(ep=2, tp=2, tokens="sharded", bias=True), EDGES),
    (L(ep=2), EDGES), (L(ep=2, data="ddp", bias=True), EDGES), (L(ep=2, data="fsdp", transport="allgather"), EDGES),
    (L(ep=2, data="hsdp", transport="shared_memory", combine="ordered"), [COLD]), (L(ep=2, cp=2), [COLD, STEP]),
    (L(ep=2, main_grad="accumulate", bias=True), [STEP]), (L(ep=2, main_grad="accumulate", data="ddp"), [STEP]),
    (L(ep=2, main_grad="overwrite", data="ddp"), [EDGES[2]]),
    (L(ep=2, activation="clamped_swiglu", bias=True), [STEP]),
    (L(ep=2, activation="relu_squared", data="fsdp"), [COLD]),
    (L(ep=2, data="fsdp", bias=True, compute="bfloat16", reduce="float32"), [CHOSEN]),
]  # fmt: skip
FOUR: Plan = [
    (L(ep=4, tp=2, tokens="replicated"), [COLD]), (L(ep=2, tp=2, tokens="sharded", data="fsdp"), [STEP]),
    (L(ep=2, etp=2, tp=4, tokens="sharded", combine="ordered"), [STEP]), (L(ep=2, data="hsdp", bias=True), [STEP]),
    (L(ep=2, etp=2, data="ddp", bias=True), EDGES[1:]), (L(ep=2, etp=2, data="fsdp", dtype="float64"), [COLD]),
    (L(ep=2, data="ddp", bias=True, main_grad="accumulate"), [STEP]), (L(cp=2, ep=4, data="fsdp"), [STEP]),
]  # fmt: skip
MORE: Plan = [
    (L(ep=4, tp=4, tokens="replicated"), [*GRID, *EDGES]), (L(ep=4, tp=4, tokens="sharded"), GRID + EDGES),
    (L(ep=2, data="hsdp2"), EDGES), (L(ep=2, tp=4, tokens="replicated", data="ddp"), EDGES),
    (L(cp=2, tp=2, tokens="sharded", ep=2, etp=2, bias=True, data="fsdp"), EDGES),
    (L(cp=2, tp=2, tokens="replicated", ep=4, zigzag=True, data="ddp"), [Case(batch=3, length=17)]),
    *(
        (L(ep=ep, etp=etp, data="fsdp", dtype=dtype, compute=compute, bias=True), [CHOSEN])
        for ep, etp in ((4, 1), (2, 2))
        for dtype, compute in (("float16", ""), ("float32", "float16"), ("bfloat16", ""))
    ),
    *(
        (L(ep=ep, etp=etp, data=data, transport=kind, combine=combine, bias=True, dtype="float64"), EDGES)
        for ep, etp in ((2, 1), (4, 1), (2, 2)) for data in ("fsdp", "ddp", "none")
        for kind in KINDS for combine in ("sum", "ordered")
    ),
]  # fmt: skip
EIGHT: Plan = [
    (L(cp=2, tp=2, tokens="sharded", ep=2, etp=2, data="fsdp"), [Case(length=8)]), (L(ep=2, data="hsdp2"), [COLD]),
    (L(cp=2, tp=2, tokens="replicated", ep=4, etp=2, data="ddp", zigzag=True), [Case(length=8)]),
    (L(ep=4, etp=2, bias=True, combine="ordered"), EDGES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, TWO), pytest.param(4, FOUR, marks=RANKS4), pytest.param(4, MORE, marks=FULL),
        pytest.param(8, EIGHT, marks=FULL),
    ],
    ids=["two", "four", "more of four", "eight"],
)  # fmt: skip
def test_layouts(ranks: int, plan: Plan) -> None:
    plan = [(replace(layout, replicate_experts=0.0), cases) for layout, cases in plan]
    for rank, found in enumerate(run_ranks(run_plan, ranks, plan, solve_all(ranks, plan), deadline=400.0)):
        bad = {
            f"{layout} {name}": error
            for layout, errors in found.items()
            for name, error in errors.items()
            if not error <= (max(1e-6, layout.bound / 2) if "norm" in name else layout.bound)
        }
        assert not bad, (rank, bad)
