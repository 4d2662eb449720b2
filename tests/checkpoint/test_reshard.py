"""Saved under one layout of ranks, loaded under another: every parameter and all optimizer state, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.ranks import run_ranks
from helpers.reshard_case import Layout, load_all, refuse_together, save_all

L, Wrong = Layout, dict[str, list[str]]
DEGREES = [L(ep=1, data="ddp"), L(ep=2, data="ddp"), L(ep=4, data="ddp")]
OTHERS = [L(ep=2, data="fsdp"), L(ep=2, data="hsdp"), L(ep=2, etp=2, data="ddp"), L(etp=2, data="fsdp")]


def check(every: list[Wrong], pairs: int) -> None:
    for rank, wrong in enumerate(every):
        assert len(wrong) == pairs
        assert not {name: found for name, found in wrong.items() if found}, rank


def four_ranks(root: Path) -> Wrong:
    save_all(root / "4", DEGREES + OTHERS)
    wrong = load_all(root / "4", DEGREES, DEGREES)
    for new, other in zip(OTHERS, [DEGREES[1], *OTHERS], strict=False):
        wrong |= load_all(root / "4", [new, other], [new])
    return wrong | load_all(root / "4", OTHERS[3:], DEGREES[:1])


def two_ranks(root: Path) -> Wrong:
    save_all(root / "2", DEGREES[:2])
    refused = refuse_together(root / "refused")
    assert "rank 1: the optimizer's exp_avg of layers.0.moe.experts.gate_up is a plain tensor" in refused
    assert not (root / "refused").exists()
    wrong = load_all(root / "2", DEGREES[:2], DEGREES[:2])
    return wrong | load_all(root / "4", [DEGREES[2], *OTHERS[2:]], [DEGREES[1], OTHERS[0]])


def one_rank(root: Path) -> Wrong:
    save_all(root / "1", DEGREES[:1])
    return load_all(root / "2", DEGREES[1:2], DEGREES[:1]) | load_all(root / "4", DEGREES[2:], DEGREES[:1])


def more_ranks(root: Path, new: Layout) -> Wrong:
    wrong = load_all(root / "1", DEGREES[:1], [new])
    return wrong | (load_all(root / "2", DEGREES[1:2], [new]) if new.ep == 4 else {})


@pytest.mark.xdist_group("ranks4")
def test_any_layout_loads_what_any_other_saved(tmp_path: Path) -> None:
    check(run_ranks(four_ranks, 4, tmp_path, deadline=300.0), 9 + 8 + 1)
    check(run_ranks(two_ranks, 2, tmp_path, deadline=300.0), 4 + 6)
    check(run_ranks(one_rank, 1, tmp_path, deadline=300.0), 2)
    check(run_ranks(more_ranks, 2, tmp_path, DEGREES[1], deadline=300.0), 1)
    check(run_ranks(more_ranks, 4, tmp_path, DEGREES[2], deadline=300.0), 2)
