"""Fixtures for the bench room."""

from __future__ import annotations

import pytest

from helpers.records import NOW


@pytest.fixture
def as_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources have the digest NOW, whoever writes to them meanwhile."""
    for module in ("campaign", "task"):
        monkeypatch.setattr(f"benchmarks.{module}.source_digest", lambda part: NOW)
