"""Real ranks over Gloo whose memory is counted, with the rows that they exchange; and the same step planned.

Legend: T tokens of a rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plan.hooked import Heap
from trimtab.dispatch import facts
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.planned import NAME, Moved, planned
from trimtab.dispatch.transport import Handshake
from trimtab.optim import Muon
from trimtab.plan.device import DEVICES
from trimtab.plan.stages import Step, measure
from trimtab.plan.without_values import World
from trimtab.train.config import MUON, Mesh, TrainConfig
from trimtab.train.loading import build_model, finished, load_model
from trimtab.train.objective import Objective

COLUMNS = facts.ROWS, facts.SLOTS, facts.REPLICAS, facts.REPLICA_SLOTS
Recorded = list[tuple[Moved, Moved]]
"""What a rank sent and received, call by call."""


def step_of(model: Any, config: TrainConfig, rank: int) -> Step:
    """Forward and backward of the run's objective, clipping, fused AdamW or Muon; ids that differ by rank."""
    objective, shape = Objective(model, config.grad_accum), (config.batch_size, config.seq_len or 0)
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss() -> Tensor:
        g = torch.Generator().manual_seed(rank)
        ids = torch.randint(model.config.vocab_size, shape, generator=g)
        mixed = config.dtype == "bfloat16" and not config.lora
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed and not dist.is_initialized()):
            return (
                objective.forward(model, {"input_ids": ids, "labels": ids.clone(), "real": ids >= 0})[1] / ids.numel()
            )

    def optimizer() -> torch.optim.Optimizer:
        if config.optim == MUON:
            return Muon(model)
        return torch.optim.AdamW(trained, foreach=False, fused=config.tp is None)

    return Step(loss=loss, optimizer=optimizer, clip=lambda: None, grad_accum=config.grad_accum)


def run_on_rank(folder: Path, config: TrainConfig, mesh: Mesh) -> tuple[int, Recorded]:
    """The most bytes in malloc and mmap of this rank's second step, over those before its model, and what it exchanged;
    once all was run before, and libraries have their buffers."""
    found: Recorded = []
    own = AllToAll.handshake

    def recording(self: AllToAll, message: Tensor) -> Handshake:
        met = own(self, message)
        first = met.sent[0]
        if first[facts.MOVEMENT] == 0:
            both = ([[row[column] for row in rows] for column in COLUMNS] for rows in (met.sent, met.received))
            sent, received = (Moved(*columns) for columns in both)
            found.append((sent, received))
        return met

    AllToAll.handshake = recording  # type: ignore[method-assign]
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # type: ignore[attr-defined]  # what oneDNN keeps is in no tensor
    heap = Heap()
    for _ in range(2):
        found.clear()
        before = heap.now()
        model = finished(load_model(folder, config, mesh), config)
        model._apply(torch.clone)  # weights loaded as slices would keep the whole; on their way to a GPU they do not
        most = heap.most(step_of(model.train(), config, dist.get_rank())) - before
        del model
    return most, found


def plan_on_rank(source: Any, config: TrainConfig, mesh: Mesh, rank: int, traffic: Any) -> int:
    """The same of rank `rank` of ranks that are not there."""
    calls = iter(traffic if isinstance(traffic, list) else ())
    given = (lambda _: next(calls)) if isinstance(traffic, list) else traffic
    with World(mesh.world, rank) as world, planned(given, rounds=True):
        model = build_model(source, config, mesh, transport=NAME)
        world.fill(model)
        stages = measure(model, step_of(model, config, rank), world, device=DEVICES["cpu"])
    assert stages.ledger is not None
    assert next(calls, None) is None, "as many calls as the run's"
    assert stages.peak[1] == stages.ledger.peak()[0], "no place outside of the stages holds more"
    return stages.peak[1]
