"""What each rank runs: a family on a mesh, its routers recorded, then told other experts, recomputed or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.integrations.transformers.routers.observe import record, replay
from trimtab.routing.replay import Decisions

from .ep_case import Case, batches
from .ep_ranks import full, load, quiet, reduce_float64_like_float32, shard_float64_whole
from .families import forward


def told(seed: int, shape: tuple[int, ...], layers: tuple[str, ...], experts: int) -> Decisions:
    """Distinct experts for each token, drawn for a data rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(*shape[:3], experts, generator=generator).argsort(-1)[..., : shape[3]]
    ids[:, 1] = -1  # decided live
    return Decisions(ids=ids, num_experts=experts, layers=layers)


def step(model: Any, data: list[Any], seed: int, inside: bool) -> tuple[list[Tensor], dict[str, list[int]]]:
    """Forward and backward of each micro-batch told its own experts; what was recorded of them."""
    losses, seen, counts = [], [], {}
    for i, batch in enumerate(data):
        with record(model) as own, torch.no_grad():
            forward(model, batch)
        ids = own.decisions().ids
        given = told(seed + i, tuple(ids.shape), own.decisions().layers, own.decisions().num_experts)
        with record(model) as recording, replay(model, given):
            losses.append(forward(model, batch)[1])
            if inside:
                losses[-1].backward()
        if not inside:
            losses[-1].backward()
        counts = {name: [len(calls)] for name, calls in recording.calls.items()}
        found = recording.decisions().ids
        assert torch.equal(torch.where(given.ids < 0, found, given.ids), found)
        seen.append(found)
    return seen, counts


def run_told(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    """Each case on this rank: gradients of a step whose routers were told, by name, and what was recorded."""
    import trimtab.integrations.transformers

    quiet()
    reduce_float64_like_float32()
    shard_float64_whole()
    trimtab.integrations.transformers.register()
    answers = []
    for case in cases:
        model = load(case, folder)
        if case.recompute:
            reentrant = case.recompute == "reentrant"
            model.train()
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        rank = case.mesh.data_rank(dist.get_rank())
        seen, counts = step(model, batches(case, model, "natural", rank), 100 * rank, inside=not case.recompute)
        grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        answers.append({"grads": grads, "seen": seen, "counts": counts})
    return answers


def alone(case: Case, model: Any) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """The same in one process: gradients of the mean over the data ranks, and what was recorded on each."""
    if case.recompute:
        model.train()
    model.zero_grad()
    recorded = []
    for rank in range(case.mesh.data_ranks):
        seen, _ = step(model, batches(case, model, "natural", rank), 100 * rank, inside=True)
        recorded.append(seen)
    grads = {n: p.grad / case.mesh.data_ranks for n, p in model.named_parameters() if p.grad is not None}
    return grads, recorded
