"""Layouts of ranks: outputs, losses, loads, input gradients, every weight gradient and the norm are one process's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.layout_case import Layout, run_plan, solve_all
from helpers.layout_truth import Case
from helpers.ranks import run_ranks

GRID = [Case(batch=batch, length=length) for batch in (1, 3) for length in (1, 3, 8, 17)]
SOME = Case(batch=3, length=3)
COLD = Case(kind="cold", micros=2, batch=2, length=3)
STEP = Case(micros=2, batch=2, length=3, totals=True)
EDGES = [COLD, STEP, Case(kind="hot", batch=2, length=5), Case(batch=2, length=5, masked=True, replayed=True)]
CHOSEN = [Case(micros=2, batch=2, length=5, replayed=True), Case(micros=2, batch=2, totals=True, replayed=True)]
"""Ids are given: in a narrow type a token near a tie would go elsewhere."""
L = Layout


def check(ranks: int, plan: list[tuple[Layout, list[Case]]]) -> None:
    for rank, found in enumerate(run_ranks(run_plan, ranks, plan, solve_all(ranks, plan), deadline=300.0)):
        bad = {
            f"{layout} {name}": error
            for layout, errors in found.items()
            for name, error in errors.items()
            if not error <= (max(1e-6, layout.bound / 2) if "norm" in name else layout.bound)
        }
        assert sum(map(len, found.values())) >= 16 * sum(len(cases) for _, cases in plan)
        assert not bad, (rank, bad)


def test_one_rank() -> None:
    check(1, [
        (L(tokens="replicated"), GRID), (L(tokens="sharded"), GRID), (L(), EDGES), (L(data="fsdp"), EDGES),
        (L(data="ddp", combine="ordered"), EDGES),
    ])  # fmt: skip


def test_two_ranks() -> None:
    check(2, [
        (L(ep=2, tp=2, tokens="replicated"), GRID + EDGES), (L(ep=2, tp=2, tokens="sharded"), GRID + EDGES),
        (L(tp=2, tokens="replicated"), [COLD]), (L(ep=2), EDGES), (L(ep=2, data="ddp"), EDGES), (L(data="ddp"), [STEP]),
        (L(ep=2, data="fsdp", transport="allgather"), EDGES), (L(data="fsdp"), [STEP]), (L(etp=2, bias=True), EDGES),
        (L(etp=2, activation="clamped_swiglu", bias=True, tp=2, tokens="sharded"), [SOME, COLD]),
        (L(etp=2, data="fsdp"), [SOME]), (L(ep=2, cp=2), [SOME, COLD, STEP]),
        *((L(etp=2, data="fsdp", bias=True, dtype=dtype), CHOSEN[:1]) for dtype in ("float64", "float16")),
    ])  # fmt: skip


@pytest.mark.xdist_group("ranks4")
def test_four_ranks() -> None:
    folds = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4) if ep * etp <= 4]
    check(4, [
        (L(ep=4, tp=4, tokens="replicated"), [*GRID, EDGES[3]]), (L(ep=4, tp=4, tokens="sharded"), GRID),
        (L(ep=4, tp=2, tokens="replicated"), [COLD]),
        (L(ep=2, etp=2, tp=4, tokens="sharded", combine="ordered"), [SOME]),
        (L(ep=2, data="hsdp"), [COLD]), (L(data="hsdp2"), [SOME]), (L(ep=2, data="ddp", bias=True), [STEP]),
        (L(ep=2, tp=2, tokens="sharded", data="fsdp"), [STEP]),
        (L(ep=2, tp=4, tokens="replicated", data="ddp"), [SOME]),
        (L(etp=2, data="fsdp", bias=True), [COLD]), (L(ep=2, etp=2, data="ddp", bias=True), [COLD]),
        *((L(ep=ep, etp=etp, data=data), [SOME]) for ep, etp in folds for data in ("fsdp", "ddp")),
    ])  # fmt: skip


def test_delayed_and_fused_weight_gradients_on_two_ranks() -> None:
    late, fused = L(delay_wgrad=True), L(main_grad="accumulate")
    check(2, [
        (replace(late, ep=2, bias=True), [COLD, STEP]), (replace(late, data="ddp", bias=True), [STEP]),
        (replace(late, data="fsdp", bias=True), [COLD, STEP]), (replace(late, etp=2, bias=True), [STEP]),
        (replace(late, ep=2, data="fsdp"), [COLD, STEP]), (replace(late, ep=2, data="ddp", bias=True), [COLD]),
        (replace(fused, ep=2, bias=True), [STEP]), (replace(fused, data="ddp", bias=True), [COLD, STEP]),
        (replace(fused, ep=2, data="ddp"), [STEP]), (replace(fused, etp=2, bias=True), [COLD]),
        (replace(fused, delay_wgrad=True, data="ddp", bias=True), [STEP]),
        (L(main_grad="overwrite", data="ddp"), [SOME]),
    ])  # fmt: skip


@pytest.mark.xdist_group("ranks4")
def test_delayed_and_fused_weight_gradients_on_four_ranks() -> None:
    late, fused = L(delay_wgrad=True), L(main_grad="accumulate")
    check(4, [
        (replace(late, ep=2, data="fsdp", bias=True), [STEP]), (replace(late, ep=2, data="ddp", bias=True), [STEP]),
        (replace(late, data="hsdp2"), [SOME]), (replace(late, ep=2, etp=2, data="fsdp", bias=True), [SOME]),
        (replace(fused, ep=2, data="ddp", bias=True), [STEP]), (replace(fused, etp=2, data="ddp", bias=True), [COLD]),
        (replace(fused, ep=2, delay_wgrad=True, data="ddp", tp=2, tokens="sharded"), [STEP]),
    ])  # fmt: skip


TYPES = [
    {"dtype": "float64"}, {"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float64", "reduce": "float32"},
    {"dtype": "float16", "reduce": "float32"}, {"reduce": "float64"}, {"reduce": "float16"},
    {"compute": "float16"}, {"compute": "float16", "reduce": "float32"}, {"compute": "bfloat16", "reduce": "float32"},
]  # fmt: skip
"""Types of parameters, of what is computed and of what is reduced. FSDP2 divides in other ways in each."""


def test_types_on_two_ranks() -> None:
    """Ranks that hold the same experts: one; one of two replicas, with experts over one dim and over two; two."""
    folds = [L(ep=2, data="fsdp"), L(ep=2, data="hsdp"), L(data="hsdp2"), L(data="fsdp")]
    check(2, [
        *((replace(fold, bias=True, **types), CHOSEN[i > 0 :]) for i, fold in enumerate(folds) for types in TYPES),
        *((replace(fold, **types), CHOSEN) for types in TYPES[:2] for fold in (
            L(ep=2, data="ddp"), L(data="ddp"), L(ep=2, data="fsdp", delay_wgrad=True),
        )),
    ])  # fmt: skip


@pytest.mark.xdist_group("ranks4")
def test_types_on_four_ranks() -> None:
    folds = [L(ep=4, data="fsdp"), L(ep=2, data="fsdp"), L(ep=2, data="hsdp2"), L(data="hsdp2"), L(ep=4, data="hsdp")]
    check(4, [
        *((replace(fold, **types), CHOSEN[1:]) for fold in folds for types in TYPES[:2]),
        *((replace(fold, **types), CHOSEN[1:]) for fold in folds[2:3] for types in TYPES[3:]),
        (L(ep=2, tp=2, tokens="sharded", data="fsdp", dtype="float64"), CHOSEN),
        (L(cp=2, ep=4, data="fsdp", dtype="float64"), CHOSEN),
    ])  # fmt: skip


@pytest.mark.xdist_group("ranks4")
def test_context_parallel_on_four_ranks() -> None:
    """Positions of a sequence on several ranks: cut unevenly, a rank without any, zig-zag, cut again for tp."""
    check(4, [
        (L(cp=4, ep=4), [SOME, COLD, Case(batch=3, length=17)]),
        (L(cp=4, ep=4, zigzag=True), [Case(batch=3, length=17)]),
        (L(cp=2, ep=2), [COLD, STEP]), (L(cp=2, ep=4, data="fsdp"), [STEP, Case(batch=2, length=5, masked=True)]),
        (L(cp=4, data="fsdp"), [SOME]), (L(cp=2, ep=2, zigzag=True, data="ddp"), [STEP]),
        (L(cp=2, tp=2, tokens="replicated", ep=4), [Case(batch=3, length=8)]),
        (L(cp=2, tp=2, tokens="replicated", ep=4, zigzag=True), [Case(batch=3, length=17)]),
        (L(cp=2, tp=2, tokens="sharded", ep=2, etp=2, bias=True, data="fsdp"), [Case(batch=3, length=8), COLD]),
        (L(cp=2, tp=2, tokens="sharded", etp=2, data="ddp"), [Case(batch=1, length=3)]),
    ])  # fmt: skip


@pytest.mark.xdist_group("ranks4")
def test_eight_ranks() -> None:
    check(8, [
        (L(cp=2, tp=2, tokens="sharded", ep=2, etp=2, data="fsdp"), [Case(batch=2, length=8)]),
        (L(cp=2, tp=2, tokens="replicated", ep=4, etp=2, data="ddp", zigzag=True), [Case(batch=2, length=8)]),
        (L(ep=2, data="hsdp2"), [COLD]),
    ])  # fmt: skip
