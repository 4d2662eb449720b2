"""An observer that keeps the runs it sees, padded batches, and how often their slots are counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.integrations.transformers.routers.observe import Observed
from trimtab.routing.observers import Loads
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


def padded(seed: int = 0) -> dict[str, Tensor]:
    """A batch of 4 sequences of up to 12 tokens."""
    draw = torch.Generator().manual_seed(seed)
    ids, lengths = torch.randint(64, (4, 12), generator=draw), torch.randint(3, 13, (4, 1), generator=draw)
    mask = torch.arange(12) < lengths
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def slots(*given: dict[str, Tensor]) -> int:
    """Of two experts a token, padding left out."""
    return 2 * sum(int(one["attention_mask"].sum()) for one in given)


def counted(loads: Loads) -> list[int]:
    """By router, since the last time."""
    return [int(load.sum()) for load in loads.take().values()]
