"""Runs cases on ranks and holds them against one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .ep_case import Case
from .ep_check import judge
from .ep_ranks import run_cases
from .parity import FLOAT64_UNSHARDABLE
from .ranks import run_ranks

SEEDS = 4


def verify(cases: Sequence[Case], folder: Path, deadline: float = 300.0) -> None:
    """Runs the cases, all of one number of ranks, and fails with the first bad value of each."""
    pending, problems = list(cases), []
    for _ in range(SEEDS):  # a near tie in a router may fall either way: then another seed
        answers = run_ranks(run_cases, pending[0].mesh.ranks, pending, str(folder), deadline=deadline)
        undecided = []
        for case, *of_ranks in zip(pending, *answers, strict=True):
            errors = judge(case, of_ranks)
            if errors is None:
                undecided.append(replace(case, seed=case.seed + 1))
                continue
            problems += errors[:1]
        pending = undecided
        if not pending:
            break
    assert not problems, "\n".join(problems)
    assert not pending, f"no seed among {SEEDS} routes alike, and that is no near tie: {', '.join(map(str, pending))}"


def both_precisions(case: Case) -> list[Case]:
    """The case in float32 and, where it can run, in float64."""
    wide = [] if case.family in FLOAT64_UNSHARDABLE else [replace(case, dtype=torch.float64)]
    return [case, *wide]
