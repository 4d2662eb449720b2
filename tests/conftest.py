"""Fixtures for all tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from helpers.device_asserts import device_asserts
from helpers.threads import torch_threads
from trimtab.errors import BackendError
from trimtab.kernels.compiled import compiled_kernels


def pytest_configure() -> None:
    """The same examples in each run, and none refused because this machine was slow to draw them."""
    with suppress(ModuleNotFoundError):  # tests on GPUs need no hypothesis
        from hypothesis import HealthCheck, settings

        settings.register_profile("same", derandomize=True, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("same")


@pytest.fixture(autouse=True, scope="session")
def kept_kernels() -> Iterator[None]:
    """The compiled kernels live as long as a layer that has them, and are tested once: here for all tests together."""
    kept = []
    with suppress(BackendError):  # what needs them says so
        kept.append(compiled_kernels())
    yield
    kept.clear()


@pytest.fixture(autouse=True, scope="session")
def as_on_a_gpu() -> Iterator[None]:
    """What a GPU asserts of grouped products is asserted here, too."""
    with device_asserts():
        yield


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread, for models that are too small for more."""
    with torch_threads(1):
        yield
