"""Fixtures for all tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """What a test draws without a generator of its own is the same in each run, and other numbers in each test."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN (integers: the largest value), so that reading what was not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
