"""Every combination of dtype, groups, which group is empty, parameter form, bias, main_grad, delay and splits."""

from __future__ import annotations

import pytest
import torch

from helpers.linear_cases import all_cases, check

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (1, 3, 6, 16)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_case(dtype: torch.dtype, groups: int) -> None:
    failed = []
    for case in all_cases(dtype, groups):
        try:
            check(case)
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} cases, the first: " + "\n".join(failed[:5])
