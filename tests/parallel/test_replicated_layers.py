"""Replicated experts of every kind, run in every way: what trains has one process's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers.ranks import run_ranks
from helpers.replicated_models import KINDS, WAYS, on_four_ranks, on_two_ranks, truths_of

FULL = pytest.mark.replicated_full


@pytest.mark.parametrize("ways", [WAYS[:2], pytest.param(WAYS[2:], marks=FULL)], ids=" ".join)
def test_every_kind_on_two_ranks(ways: Sequence[str]) -> None:
    assert run_ranks(on_two_ranks, 2, truths_of(KINDS, 2), ways, deadline=300.0) == [{}] * 2


@pytest.mark.xdist_group("ranks4")
@pytest.mark.parametrize("kinds", [["biased", "nf4, adapted"], pytest.param(list(KINDS), marks=FULL)], ids=len)
def test_expert_tensor_parallel_and_fsdp_on_four_ranks(kinds: list[str]) -> None:
    assert run_ranks(on_four_ranks, 4, truths_of(kinds, 4, 4.0), deadline=300.0) == [{}] * 4
