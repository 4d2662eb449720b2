"""An observer that keeps the runs it sees."""

from __future__ import annotations

from typing import Any

from trimtab.integrations.transformers.routers.observe import Observed
from trimtab.routing.port import Observer, RouterRun


class Seeing(Observer):
    """runs: all, in their order. last: by router."""

    def __init__(self) -> None:
        self.runs: list[RouterRun] = []

    def see(self, run: RouterRun) -> None:
        self.runs.append(run)

    @property
    def last(self) -> dict[str, RouterRun]:
        return {run.info.name: run for run in self.runs}


def seen(model: Any) -> Seeing:
    """One that sees the model's routers from now on."""
    seeing = Seeing()
    Observed(model, seeing)
    return seeing
