"""Known bugs of the field, put into trimtab at run time: what the ledger must catch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Run with one bug put in, or with none."""
    yield
