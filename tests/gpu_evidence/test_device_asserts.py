"""The asserts of a GPU's grouped products, which stand around every product of these tests, find what they are for."""

from __future__ import annotations

import pytest
import torch

from helpers.device_asserts import GROUPS
from trimtab.kernels.api import Block
from trimtab.kernels.torch_mm import GroupedMMBackend

A, B = 16, 24
OFFS = torch.tensor([3, 3, 8], dtype=torch.int32)


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, A, dtype=dtype), torch.zeros(3, A, B, dtype=dtype)


def test_ours_pass_whatever_the_sizes_and_layouts_are() -> None:
    x, w = operands()
    offsets = torch.nn.functional.pad(OFFS.long(), (1, 0))
    block, kernels, dy = Block(slice(0, 3), slice(0, 8), offsets), GroupedMMBackend(), torch.zeros(8, B).bfloat16()
    for weight in (w, w.transpose(1, 2).contiguous().transpose(1, 2)):
        assert kernels.grouped_mm(x, weight, block).shape == (8, B)
        kernels.grouped_wgrad(x, dy, block, torch.empty_like(weight))
    kernels.grouped_wgrad(x[:, :1].expand(8, A), dy, block, torch.empty_like(w))


def test_what_a_gpu_refuses_is_refused() -> None:
    x, w = operands()
    cases = (
        ("offsets torch.int64", x, w, OFFS.long()),
        ("offsets .0, 3, 2, 8.", x, w, torch.tensor([3, 2, 8], dtype=torch.int32)),
        ("end at 9 of 8", x, w, torch.tensor([3, 3, 9], dtype=torch.int32)),
        (f"{GROUPS} groups", x, w[:1].expand(GROUPS, A, B), torch.full((GROUPS,), 8, dtype=torch.int32)),
        ("begins at", torch.zeros(8 * A + 1).bfloat16()[1:].view(8, A), w, OFFS),
        ("has strides", torch.zeros(8, A + 1).bfloat16()[:, :A], w, OFFS),
        ("groups lie along", torch.zeros(A, 8).bfloat16(), torch.zeros(8, B).bfloat16(), OFFS),
    )
    for why, a, b, offs in cases:
        with pytest.raises(AssertionError, match=why):
            torch.nn.functional.grouped_mm(a, b, offs=offs)
