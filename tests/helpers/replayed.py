"""Decisions that are not a model's own, a run of it that is told them, and how two runs compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from helpers.families import Batch, forward
from helpers.forced_routers import forced
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.routing.replay import Decisions

Values = dict[str, Tensor]


def run(model: Any, batch: Batch) -> Values:
    """Output, loss and gradients by name."""
    model.zero_grad()
    output, loss = forward(model, batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "loss": loss.detach()} | grads


def others(decisions: Decisions, seed: int = 1) -> Decisions:
    """Ids that are drawn, for the tokens that have ids."""
    generator = torch.Generator().manual_seed(seed)
    E, K = decisions.num_experts, decisions.ids.shape[3]
    drawn = torch.rand(*decisions.ids.shape[:3], E, generator=generator).argsort(-1)[..., :K]
    return Decisions(ids=torch.where(decisions.ids < 0, -1, drawn), num_experts=E, layers=decisions.layers)


@contextmanager
def forced_by(model: Any, decisions: Decisions) -> Iterator[None]:
    """Within, the routers' own code takes these decisions."""
    by_router: dict[str, list[Tensor]] = {}
    for i, name in enumerate(decisions.layers):
        ids = decisions.ids[:, :, i].flatten(0, 1)
        seen = ids[(ids >= 0).all(-1)] if "_moe.gate" in name else ids  # where a modality has routers of its own
        by_router.setdefault(name.partition("#")[0], []).append(seen)
    with forced({place.name: place.module for place in find_routers(model)}, by_router, decisions.num_experts):
        yield


def close(ours: Values, true: Values, relative: float, floor: float = 1e-4) -> None:
    """floor: of the largest value, below which there is nothing but rounding."""
    assert ours.keys() == true.keys()
    largest = max(float(t.abs().max()) for t in true.values())
    for name, wanted in true.items():
        scale = max(float(wanted.abs().max()), floor * largest)
        error = float((ours[name] - wanted).abs().max())
        assert error <= relative * scale, f"{name}: off by {error:.1e} of {scale:.1e}"
