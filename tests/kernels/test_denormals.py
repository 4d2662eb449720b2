"""Whether denormals count is said by the caller's thread alone, and holds on every thread of the compiled kernels."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from helpers.threads import torch_threads
from trimtab.experts.module import ExpertMLP

ROWS = 600
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="threads take the caller's word on x86 alone")


@contextmanager
def flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine does not flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("later", [False, True])
def test_of_experts(later: bool) -> None:
    experts = ExpertMLP(4, 64, 64, activation="gelu", delay_wgrad=later, kernels="cpu", dtype=torch.float32)
    with torch.no_grad():
        experts.up.fill_(1e-36)
        experts.down.fill_(1e20)
    x, ids, dy = torch.full((ROWS, 64), 1e-4), torch.arange(ROWS)[:, None] % 4, torch.full((ROWS, 64), 1e10)
    with torch_threads(2):
        for _ in range(5):  # threads take what they come to first
            w = torch.ones(ROWS, 1, requires_grad=True)
            y = experts(x, ids, w)
            assert (y > 0).all()
            with flushed():
                assert not experts(x, ids, w).any()
                y.backward(dy)
                experts.backward_dw()
            assert experts.down.grad is not None
            assert not experts.down.grad.any()
            assert not w.grad.any()  # type: ignore[union-attr]
            assert (experts(x, ids, w) > 0).all(), "threads keep what they were told"
            experts.down.grad = None
