"""Low precision under ExpertParallel has the values of the layer without it."""

from __future__ import annotations

from helpers.ranks import run_ranks
from helpers.recipe_case import histories, run_all


def test_recipes_on_two_ranks() -> None:
    for errors in run_ranks(run_all, 2, deadline=120.0):
        assert len(errors) == 13 * 5
        bad = {name: error for name, error in errors.items() if not error <= 2e-6}
        assert not bad


def test_state_dicts_hold_the_state_of_all_experts() -> None:
    for errors in run_ranks(histories, 2):
        assert len(errors) == 2 * 2 * 3
        assert set(errors.values()) == {0.0}
