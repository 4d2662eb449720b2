"""Matrices that are cut by a mesh: parameters and state have the bits of one process, whole experts send nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.optim_ranks import LAYOUTS, under_layouts
from helpers.ranks import run_ranks

DTYPES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"low_bits": True}),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "options"), DTYPES, ids=["fp32", "bf16", "low bits"])
def test_every_layout_of_two_ranks_has_the_bits_of_one_process(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for found in run_ranks(under_layouts, 2, tuple(LAYOUTS[2]), dtype, options, deadline=120.0):
        assert [(name, wrong) for name, (wrong, _) in found.items() if wrong] == []
        assert found["ep 2"][1] == found["ddp"][1] == 0
        assert {number for _, number in found.values()} > {0}
