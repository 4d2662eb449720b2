"""Strides that the shape says, also where a tensor has no element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trimtab.experts.linear import GroupedLinear
from trimtab.kernels.tensor_checks import row_major

ONE = torch.ones(())
ODD = [
    ONE.expand(0, 8), ONE.expand(3, 0), ONE.expand(5, 8), ONE.expand(1, 1), torch.arange(8.0).view(8, 1).t(),
    torch.arange(24.0).view(3, 8)[:, ::2], torch.arange(8.0), ONE,
]  # fmt: skip


@pytest.mark.parametrize("t", ODD)
def test_values_and_strides(t: Tensor) -> None:
    made = row_major(t)
    assert torch.equal(made, t)
    assert made.stride() == torch.empty(t.shape, device="meta").stride()


def test_what_is_so_already_is_not_copied() -> None:
    t = torch.ones(3, 8)
    assert row_major(t) is t


@pytest.mark.parametrize("kernels", ["torch", "grouped_mm"])
def test_one_row_that_was_a_column(kernels: str) -> None:
    layer, x = GroupedLinear(2, 64, 32, kernels=kernels), torch.randn(64, 1).t()
    torch.testing.assert_close(layer(x, [0, 1]), x @ layer.weights[0][1].t() + layer.biases[0][1])
