"""The factor by which gradients are clipped."""

from __future__ import annotations

import pytest
import torch

from helpers.expert_checks import clipped_by_one_factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.37, 10_000.0])
def test_it_is_one_for_gradients_of_all_dtypes_and_is_rounded_once(dtype: torch.dtype, scale: float) -> None:
    clipped_by_one_factor("cpu", dtype, scale)
