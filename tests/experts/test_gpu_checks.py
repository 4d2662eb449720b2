"""The checks of tests/gpu that mean something without a GPU, on the CPU: so that they are known to run and to pass."""

from __future__ import annotations

import pytest
import torch

from helpers.expert_checks import (
    BOUNDS,
    HARDWARE,
    SIZES,
    LinearCase,
    hardware_is_emulation,
    linear_is_true,
    mlp_is_true,
)
from trimtab.experts.weight_grad import MODES


@pytest.mark.parametrize("form", ["list", "cpu"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_grouped_linear_is_true(dtype: torch.dtype, form: str) -> None:
    for i, sizes in enumerate(SIZES):
        for delayed in (False, True):
            case = LinearCase(
                device="cpu", dtype=dtype, sizes=tuple(sizes), form=form, tail=8 * (i % 2), main_grad=MODES[i % 3],
                delayed=delayed, single=i % 2 == 0, kernels="grouped_mm",
            )  # fmt: skip
            linear_is_true(case)


@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_expert_mlp_is_true(tokens: int) -> None:
    mlp_is_true("cpu", tokens)


@pytest.mark.parametrize("name", HARDWARE)
def test_a_recipe_s_choice_is_its_emulation(name: str) -> None:
    for sizes in SIZES:
        case = LinearCase(
            device="cpu", dtype=torch.bfloat16, sizes=tuple(sizes), form="cpu", tail=8, recipe=HARDWARE[name],
            kernels="grouped_mm",
        )  # fmt: skip
        hardware_is_emulation(case)
