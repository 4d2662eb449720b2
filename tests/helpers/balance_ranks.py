"""Steps of a tiny transformers model under `Balance`, the batch on one rank or shared out over several."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from helpers.families import build_model
from trimtab.integrations.transformers import Balance
from trimtab.integrations.transformers.routers import find_routers
from trimtab.integrations.transformers.watch import Look, Watch

STEPS, MICRO, SEQUENCES, LENGTH = 5, 2, 4, 12


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """By step and micro-batch: ids and attention mask, [SEQUENCES, LENGTH] each, of sequences of other lengths."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        step = []
        for _ in range(MICRO):
            lengths = torch.randint(3, LENGTH + 1, (SEQUENCES, 1), generator=draw)
            ids = torch.randint(64, (SEQUENCES, LENGTH), generator=draw)
            step.append((ids, (torch.arange(LENGTH) < lengths).long()))
        found.append(step)
    return found


def run_balanced(family: str, recompute: str, options: dict[str, Any]) -> dict[str, Any]:
    """What each step decided for this rank's sequences, loads, biases, values of losses, and the parameters."""
    torch.set_num_threads(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = build_model(family, dtype=torch.float64).train()
    model.set_experts_implementation("eager")  # which takes float64
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    balance = Balance(model, **options)
    balance.micro_batches = MICRO
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    places = find_routers(model)
    kept: dict[str, list[Any]] = {"ids": [], "loads": [], "biases": [], "losses": []}
    seen_now: dict[str, Tensor] = {}
    Watch.of(model, places).add(Look(lambda seen: seen_now.__setitem__(seen.place.name, seen.ids_TK)))
    share = SEQUENCES // size
    for step in batches():
        optimizer.zero_grad()
        targets = sum(int(mask[:, 1:].sum()) for _, mask in step)
        for whole_ids, whole_mask in step:
            ids, mask = (t[rank * share : (rank + 1) * share] for t in (whole_ids, whole_mask))
            logits = wrapped(input_ids=ids, attention_mask=mask).logits[:, :-1]
            kept["ids"].append({name: t.view(*ids.shape, -1)[mask.bool()] for name, t in seen_now.items()})
            labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * size / targets
            loss.backward()
        optimizer.step()
        kept["loads"].append(balance.step())
        kept["losses"].append({name: float(value) for name, value in balance.losses.items()})
        kept["biases"].append({n: b.clone() for n, b in model.named_buffers() if n.endswith("bias")})
    return kept | {"parameters": dict(model.named_parameters())}
