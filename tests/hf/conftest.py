"""Fixtures of the transformers tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def registered() -> None:
    """`"trimtab"` is a name that transformers knows."""
    import trimtab.hf

    trimtab.hf.register()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: the models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
