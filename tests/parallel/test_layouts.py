"""Layouts of ranks: outputs, input gradients, every weight gradient and the clipped norm are the single process's."""

from __future__ import annotations

import pytest

from parallel.layout_case import Layout, run_layouts
from trimtab.verify.ranks import preload, run_ranks

preload("torch.distributed.fsdp", "torch.nn.parallel", "trimtab.parallel.ddp", "trimtab.parallel.fsdp")
SHAPES = [("plain", 1, batch, length) for batch in (1, 3) for length in (1, 3, 8, 17)]
EDGES = [("cold", 2, 2, 3), ("hot", 1, 2, 5), ("nosync", 2, 1, 3)]
L = Layout
ONE = [L(), L(data="fsdp"), L(data="ddp", combine="ordered")]
TWO = [
    L(ep=2), L(ep=2, tp=2, tokens="replicated"), L(ep=2, tp=2, tokens="sharded"), L(tp=2, tokens="replicated"),
    L(ep=2, data="ddp"), L(ep=2, data="fsdp", transport="allgather"), L(etp=2, bias=True),
    L(etp=2, activation="clamped_swiglu", bias=True, tp=2, tokens="sharded"),
]  # fmt: skip
FOUR = [
    L(ep=4, tp=2, tokens="replicated"), L(ep=2, etp=2, tp=4, tokens="sharded", combine="ordered"),
    L(ep=2, data="fsdp"), L(ep=2, data="hsdp"), L(ep=2, data="ddp"), L(ep=4, data="ddp"),
    L(ep=2, tp=2, tokens="sharded", data="fsdp"), L(ep=2, tp=4, tokens="replicated", data="ddp"),
    L(etp=2, data="fsdp", bias=True), L(ep=2, etp=2, data="ddp", bias=True), L(ep=4, data="fsdp"),
]  # fmt: skip


def check(ranks: int, layouts: list[Layout], cases: list[tuple[str, int, int, int]]) -> None:
    for rank, errors in enumerate(run_ranks(run_layouts, ranks, layouts, cases, deadline=300.0)):
        bad = {name: error for name, error in errors.items() if not error <= (1e-6 if "norm" in name else 2e-6)}
        assert errors
        assert not bad, (rank, bad)


def test_one_rank() -> None:
    check(1, ONE, [SHAPES[1], SHAPES[6], *EDGES])


def test_two_ranks() -> None:
    check(2, TWO[1:3], SHAPES)
    check(2, TWO, [SHAPES[5], *EDGES])


@pytest.mark.xdist_group("ranks4")
def test_four_ranks() -> None:
    check(4, FOUR[:1], SHAPES[::2])
    check(4, FOUR, [SHAPES[5], *EDGES[:2]])
