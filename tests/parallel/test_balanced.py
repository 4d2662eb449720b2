"""Balanced experts on real ranks: outputs and every gradient are the oracle's, however the tokens fall."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.balanced_ranks import PATTERNS, WAYS, solve, too_far_on_rank
from helpers.layout_case import Layout, run_plan, solve_all
from helpers.layout_truth import Case
from helpers.ranks import preload, run_ranks
from trimtab.dispatch.transports import TRANSPORTS

preload("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "trimtab.parallel.ddp", "trimtab.parallel.fsdp")
KINDS = [name for name in TRANSPORTS if name != "auto"]


def check(ranks: int, transports: list[str], ways: tuple[str, ...], tolerances: tuple[object, ...]) -> None:
    answers = run_ranks(too_far_on_rank, ranks, solve(PATTERNS, ranks), transports, ways, tolerances, deadline=300.0)
    assert [bad for bad, _ in answers] == [{}] * ranks
    assert all(copies > 0 for _, copies in answers)


def test_two_ranks() -> None:
    check(2, KINDS[:1], WAYS[:2], (0.0,))


L = Layout
GRID = [Case(batch=1, length=1), Case(batch=3, length=17)]
COLD, STEP = Case(kind="cold", micros=2), Case(micros=2, totals=True)
EDGES = [COLD, STEP, Case(kind="hot", length=5), Case(length=5, masked=True, replayed=True)]


def check_layouts(ranks: int, plan: list[tuple[Layout, list[Case]]]) -> None:
    for rank, found in enumerate(run_ranks(run_plan, ranks, plan, solve_all(ranks, plan), deadline=300.0)):
        bad = {
            f"{layout} {name}": error
            for layout, errors in found.items()
            for name, error in errors.items()
            if not error <= (max(1e-6, layout.bound / 2) if "norm" in name else layout.bound)
        }
        assert not bad, (rank, bad)


def balanced(ranks: int, plan: list[tuple[Layout, list[Case]]]) -> None:
    check_layouts(ranks, [(replace(layout, balance=0.0), cases) for layout, cases in plan])


def test_layouts_of_two_ranks() -> None:
    balanced(2, [
        (L(ep=2, tp=2, tokens="replicated"), GRID + EDGES), (L(ep=2, tp=2, tokens="sharded", bias=True), EDGES),
        (L(ep=2), EDGES), (L(ep=2, data="ddp", bias=True), EDGES), (L(ep=2, data="fsdp", transport="allgather"), EDGES),
        (L(ep=2, data="hsdp", transport="shared_memory", combine="ordered"), [COLD]), (L(ep=2, cp=2), [COLD, STEP]),
        (L(ep=2, main_grad="accumulate", bias=True), [STEP]), (L(ep=2, main_grad="accumulate", data="ddp"), [STEP]),
    ])  # fmt: skip


@pytest.mark.xdist_group("ranks4")
def test_layouts_of_four_ranks() -> None:
    folds = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4) if ep * etp <= 4]
    balanced(4, [
        (L(ep=4, tp=4, tokens="replicated"), [*GRID, EDGES[3]]), (L(ep=4, tp=4, tokens="sharded"), GRID),
        (L(ep=4, tp=2, tokens="replicated"), [COLD]),
        (L(ep=2, etp=2, tp=4, tokens="sharded", combine="ordered"), EDGES),
        (L(ep=2, data="hsdp"), [COLD]), (L(ep=2, data="ddp", bias=True), [STEP]),
        (L(ep=2, tp=2, tokens="sharded", data="fsdp"), [STEP]),
        (L(ep=2, tp=4, tokens="replicated", data="ddp"), [STEP]),
        (L(ep=2, etp=2, data="ddp", bias=True), EDGES),
        (L(ep=2, etp=2, data="fsdp", bias=True, dtype="float64"), [COLD]),
        (L(ep=2, data="ddp", bias=True, main_grad="accumulate"), [STEP]),
        (L(cp=2, ep=4, data="fsdp", dtype="float64"), [STEP]),
        *((L(ep=ep, etp=etp, data=data), [STEP]) for ep, etp in folds for data in ("fsdp", "ddp")),
    ])  # fmt: skip
