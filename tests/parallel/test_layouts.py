"""Layouts of ranks: outputs, losses, loads, input gradients, every weight gradient and the norm are one process's; with
replicated experts as without, in steps of several micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.layout_case import Layout, run_plan, solve_all
from helpers.layout_truth import Case
from helpers.ranks import run_ranks
from trimtab.dispatch.transports import TRANSPORTS

FULL, RANKS4 = pytest.mark.replicated_full, pytest.mark.xdist_group("ranks4")
KINDS = [name for name in TRANSPORTS if name != "auto"]
GRID = [Case(batch=batch, length=length) for batch in (1, 3) for length in (1, 3, 8, 17)]
FEW = [GRID[0], GRID[-1]]
SOME = Case(batch=3, length=3)
COLD = Case(kind="cold", micros=2, batch=2, length=3)
STEP = Case(micros=2, batch=2, length=3, totals=True)
HOT, MASKED = Case(kind="hot", batch=2, length=5), Case(batch=2, length=5, masked=True, replayed=True)
EDGES = [COLD, STEP, HOT, MASKED]
CHOSEN = [Case(micros=2, batch=2, length=5, replayed=True), Case(micros=2, batch=2, totals=True, replayed=True)]
"""Ids are given: in a narrow type a token near a tie would go elsewhere."""
L, S, R = Layout, {"tokens": "sharded"}, {"tokens": "replicated"}
LATE, FUSED, B = L(delay_wgrad=True), L(main_grad="accumulate"), {"bias": True}
TYPES: list[dict[str, Any]] = [
    {"dtype": "float64"}, {"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float64", "reduce": "float32"},
    {"dtype": "float16", "reduce": "float32"}, {"reduce": "float64"}, {"reduce": "float16"},
    {"compute": "float16"}, {"compute": "float16", "reduce": "float32"}, {"compute": "bfloat16", "reduce": "float32"},
]  # fmt: skip
"""Types of parameters, of what is computed and of what is reduced. FSDP2 divides in other ways in each."""
FOLDS2 = [L(ep=2, data="fsdp"), L(ep=2, data="hsdp"), L(data="hsdp2"), L(data="fsdp")]
"""Ranks that hold the same experts: one; one of two replicas, with experts over one dim and over two; two."""
FOLDS4 = [L(ep=4, data="fsdp"), L(ep=2, data="fsdp"), L(ep=2, data="hsdp2"), L(data="hsdp2"), L(ep=4, data="hsdp")]
MESHES = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4) if ep * etp <= 4]
Plan = list[tuple[Layout, list[Case]]]
PLANS: dict[str, tuple[int, Plan]] = {
    "one rank": (1, [
        (L(**R), GRID), (L(**S), GRID), (L(), EDGES), (L(data="fsdp"), EDGES),
        (L(data="ddp", combine="ordered"), EDGES),
    ]),
    "two ranks": (2, [
        (L(ep=2, tp=2, **R), GRID + EDGES), (L(ep=2, tp=2, **S), GRID + EDGES),
        (L(tp=2, **R), [COLD]), (L(ep=2), EDGES), (L(ep=2, data="ddp"), EDGES), (L(data="ddp"), [STEP]),
        (L(ep=2, data="fsdp", transport="allgather"), EDGES), (L(data="fsdp"), [STEP]), (L(etp=2, **B), EDGES),
        (L(etp=2, activation="clamped_swiglu", **B, tp=2, **S), [SOME, COLD]),
        (L(etp=2, data="fsdp"), [SOME]), (L(ep=2, cp=2), [SOME, COLD, STEP]),
        *((L(etp=2, data="fsdp", **B, dtype=dtype), CHOSEN[:1]) for dtype in ("float64", "float16")),
    ]),
    "four ranks": (4, [
        (L(ep=4, tp=4, **R), [*GRID, MASKED]), (L(ep=4, tp=4, **S), GRID), (L(ep=4, tp=2, **R), [COLD]),
        (L(ep=2, etp=2, tp=4, **S, combine="ordered"), [SOME]), (L(ep=2, data="hsdp"), [COLD]),
        (L(data="hsdp2"), [SOME]), (L(ep=2, data="ddp", **B), [STEP]), (L(ep=2, tp=2, **S, data="fsdp"), [STEP]),
        (L(ep=2, tp=4, **R, data="ddp"), [SOME]), (L(etp=2, data="fsdp", **B), [COLD]),
        (L(ep=2, etp=2, data="ddp", **B), [COLD]),
        *((L(ep=ep, etp=etp, data=data), [SOME]) for ep, etp in MESHES for data in ("fsdp", "ddp")),
    ]),
    "delayed and fused gradients on two ranks": (2, [
        (replace(LATE, ep=2, **B), [COLD, STEP]), (replace(LATE, data="ddp", **B), [STEP]),
        (replace(LATE, data="fsdp", **B), [COLD, STEP]), (replace(LATE, etp=2, **B), [STEP]),
        (replace(LATE, ep=2, data="fsdp"), [COLD, STEP]), (replace(LATE, ep=2, data="ddp", **B), [COLD]),
        (replace(FUSED, ep=2, **B), [STEP]), (replace(FUSED, data="ddp", **B), [COLD, STEP]),
        (replace(FUSED, ep=2, data="ddp"), [STEP]), (replace(FUSED, etp=2, **B), [COLD]),
        (replace(FUSED, delay_wgrad=True, data="ddp", **B), [STEP]),
        (L(main_grad="overwrite", data="ddp"), [SOME]),
    ]),
    "delayed and fused gradients on four ranks": (4, [
        (replace(LATE, ep=2, data="fsdp", **B), [STEP]), (replace(LATE, ep=2, data="ddp", **B), [STEP]),
        (replace(LATE, data="hsdp2"), [SOME]), (replace(LATE, ep=2, etp=2, data="fsdp", **B), [SOME]),
        (replace(FUSED, ep=2, data="ddp", **B), [STEP]), (replace(FUSED, etp=2, data="ddp", **B), [COLD]),
        (replace(FUSED, ep=2, delay_wgrad=True, data="ddp", tp=2, **S), [STEP]),
    ]),
    "types on two ranks": (2, [
        *((replace(fold, **B, **types), CHOSEN[i > 0 :]) for i, fold in enumerate(FOLDS2) for types in TYPES),
        *((replace(fold, **types), CHOSEN) for types in TYPES[:2] for fold in (
            L(ep=2, data="ddp"), L(data="ddp"), L(ep=2, data="fsdp", delay_wgrad=True),
        )),
    ]),
    "types on four ranks": (4, [
        *((replace(fold, **types), CHOSEN[1:]) for fold in FOLDS4 for types in TYPES[:2]),
        *((replace(fold, **types), CHOSEN[1:]) for fold in FOLDS4[2:3] for types in TYPES[3:]),
        (L(ep=2, tp=2, **S, data="fsdp", dtype="float64"), CHOSEN),
        (L(cp=2, ep=4, data="fsdp", dtype="float64"), CHOSEN),
    ]),
    "context parallel on four ranks": (4, [  # cut unevenly, a rank without any position, zig-zag, cut again for tp
        (L(cp=4, ep=4), [SOME, COLD, GRID[-1]]),
        (L(cp=4, ep=4, zigzag=True), [GRID[-1]]),
        (L(cp=2, ep=2), [COLD, STEP]), (L(cp=2, ep=4, data="fsdp"), [STEP, Case(batch=2, length=5, masked=True)]),
        (L(cp=4, data="fsdp"), [SOME]), (L(cp=2, ep=2, zigzag=True, data="ddp"), [STEP]),
        (L(cp=2, tp=2, **R, ep=4), [GRID[-2]]),
        (L(cp=2, tp=2, **R, ep=4, zigzag=True), [GRID[-1]]),
        (L(cp=2, tp=2, **S, ep=2, etp=2, **B, data="fsdp"), [GRID[-2], COLD]),
        (L(cp=2, tp=2, **S, etp=2, data="ddp"), [GRID[1]]),
    ]),
    "eight ranks": (8, [
        (L(cp=2, tp=2, **S, ep=2, etp=2, data="fsdp"), [Case(batch=2, length=8)]),
        (L(cp=2, tp=2, **R, ep=4, etp=2, data="ddp", zigzag=True), [Case(batch=2, length=8)]),
        (L(ep=2, data="hsdp2"), [COLD]),
    ]),
    "LoRA on two ranks": (2, [
        (L(ep=2, lora=True), [COLD, STEP]), (L(ep=2, lora=True, data="ddp"), [COLD]), (L(etp=2, lora=True), [STEP]),
        (L(lora=True, data="fsdp"), [STEP]),
    ]),
    "LoRA on four ranks": (4, [
        (L(ep=2, lora=True, data="hsdp"), [STEP]), (L(ep=2, etp=2, lora=True, data="fsdp"), [COLD]),
        (L(ep=2, tp=2, **S, lora=True, data="fsdp"), [STEP]),
    ]),
}  # fmt: skip
REPLAYED = Case(micros=2, length=5, totals=True, replayed=True)
REPLICATED: dict[str, tuple[int, Plan]] = {
    "two": (2, [
        (L(ep=2, tp=2, **R), FEW + EDGES), (L(ep=2, tp=2, **S, **B), EDGES),
        (L(ep=2), EDGES), (L(ep=2, data="ddp", **B), EDGES), (L(ep=2, data="fsdp", transport="allgather"), EDGES),
        (L(ep=2, data="hsdp", transport="shared_memory", combine="ordered"), [COLD]), (L(ep=2, cp=2), [COLD, STEP]),
        (L(ep=2, main_grad="accumulate", **B), [STEP]), (L(ep=2, main_grad="accumulate", data="ddp"), [STEP]),
        (L(ep=2, main_grad="overwrite", data="ddp"), [HOT]),
        (L(ep=2, activation="clamped_swiglu", **B), [STEP]),
        (L(ep=2, activation="relu_squared", data="fsdp"), [COLD]),
        (L(ep=2, data="fsdp", **B, compute="bfloat16", reduce="float32"), [REPLAYED]),
    ]),
    "four": (4, [
        (L(ep=4, tp=2, **R), [COLD]), (L(ep=2, tp=2, **S, data="fsdp"), [STEP]),
        (L(ep=2, etp=2, tp=4, **S, combine="ordered"), [STEP]), (L(ep=2, data="hsdp", **B), [STEP]),
        (L(ep=2, etp=2, data="ddp", **B), EDGES[1:]), (L(ep=2, etp=2, data="fsdp", dtype="float64"), [COLD]),
        (L(ep=2, data="ddp", **B, main_grad="accumulate"), [STEP]), (L(cp=2, ep=4, data="fsdp"), [STEP]),
    ]),
    "more of four": (4, [
        (L(ep=4, tp=4, **R), FEW + EDGES), (L(ep=4, tp=4, **S), FEW + EDGES),
        (L(ep=2, data="hsdp2"), EDGES), (L(ep=2, tp=4, **R, data="ddp"), EDGES),
        (L(cp=2, tp=2, **S, ep=2, etp=2, **B, data="fsdp"), EDGES),
        (L(cp=2, tp=2, **R, ep=4, zigzag=True, data="ddp"), FEW[1:]),
        *(
            (L(ep=ep, etp=etp, data="fsdp", dtype=dtype, compute=compute, **B), [REPLAYED])
            for ep, etp in ((4, 1), (2, 2))
            for dtype, compute in (("float16", ""), ("float32", "float16"), ("bfloat16", ""))
        ),
        *(
            (L(ep=ep, etp=etp, data=data, transport=kind, combine=combine, **B, dtype="float64"), EDGES)
            for ep, etp in ((2, 1), (4, 1), (2, 2)) for data in ("fsdp", "ddp", "none")
            for kind in KINDS for combine in ("sum", "ordered")
        ),
    ]),
    "eight": (8, [
        (L(cp=2, tp=2, **S, ep=2, etp=2, data="fsdp"), [Case(length=8)]), (L(ep=2, data="hsdp2"), [COLD]),
        (L(cp=2, tp=2, **R, ep=4, etp=2, data="ddp", zigzag=True), [Case(length=8)]),
        (L(ep=4, etp=2, **B, combine="ordered"), EDGES),
    ]),
}  # fmt: skip


def check(ranks: int, plan: Plan) -> None:
    for rank, found in enumerate(run_ranks(run_plan, ranks, plan, solve_all(ranks, plan), deadline=400.0)):
        bad = {
            f"{layout} {name}": error
            for layout, errors in found.items()
            for name, error in errors.items()
            if not error <= (max(1e-6, layout.bound / 2) if "norm" in name else layout.bound)
        }
        assert sum(map(len, found.values())) >= 16 * sum(len(cases) for _, cases in plan)
        assert not bad, (rank, bad)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[RANKS4] * (PLANS[n][0] > 2)) for n in PLANS])
def test_layouts(name: str) -> None:
    check(*PLANS[name])


@pytest.mark.parametrize("name", ["two", pytest.param("four", marks=RANKS4),
                                  *(pytest.param(name, marks=FULL) for name in ("more of four", "eight"))])  # fmt: skip
def test_with_replicated_experts(name: str) -> None:
    ranks, plan = REPLICATED[name]
    check(ranks, [(replace(layout, replicate_experts=0.0), cases) for layout, cases in plan])
