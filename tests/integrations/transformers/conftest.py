"""Fixtures of the transformers tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def registered() -> None:
    """`"trimtab"` is a name that transformers knows."""
    import trimtab.integrations.transformers

    trimtab.integrations.transformers.register()
