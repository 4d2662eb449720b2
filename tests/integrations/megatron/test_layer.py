"""Megatron's MoE layer with our exchange, and with our experts: outputs and every gradient are the dense truth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.megatron_case import KINDS, Case, check, of_kind

CASES = {
    "balanced": Case(tokens=[(6, 2)]),
    "uneven": Case(tokens=[(6, 2), (3, 1), (1, 1), (5, 3)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind: str) -> None:
    check(of_kind(CASES["balanced"], kind), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, kind: str) -> None:
    check(replace(of_kind(CASES[case], kind), sizes={"ep": 2}), 2)
