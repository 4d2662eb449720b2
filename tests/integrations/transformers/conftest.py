"""Fixtures of the transformers tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.threads import torch_threads


@pytest.fixture
def registered() -> None:
    """`"trimtab"` is a name that transformers knows."""
    import trimtab.integrations.transformers

    trimtab.integrations.transformers.register()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: the models are too small for more."""
    with torch_threads(1):
        yield
