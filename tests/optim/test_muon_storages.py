"""The same experts train alike however they are stored, and to the bits of `torch.optim.Muon` on each matrix."""

from __future__ import annotations

import pytest

from helpers.storages import STORAGES, check_resumed, check_storage


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("name", list(STORAGES))
def test_each_matrix_has_the_bits_of_torch_alone(name: str, scale: str, nesterov: bool) -> None:
    check_storage(name, scale, nesterov)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped() -> None:
    check_resumed()
