"""The memory of one step of each contestant, all at once: bytes do not depend on who else runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.contestant import Contestant
from benchmarks.race import Field, Say, joined


def weigh(contestants: Sequence[Contestant], mode: str, *, patience: float, say: Say) -> dict[str, dict[str, Any]]:
    """contestant -> bytes of one step, of the rank with the most; or {"failed": why}."""
    field, found = Field(patience, say), dict[str, dict[str, Any]]()
    with field.ended():
        field.build(contestants, "strict")
        for c in contestants:
            with field.excused(c.name):
                field.team(c.name).tell(("memory", mode))
        for c in contestants:
            with field.excused(c.name):
                found[c.name] = joined(field.team(c.name).answers(patience))
    return {c.name: found[c.name] if c.name in found else {"failed": field.failed[c.name]} for c in contestants}
