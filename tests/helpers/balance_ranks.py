"""Steps of a tiny transformers model under `LoadBalancer`, the batch on one rank or shared out over several."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from helpers import ep_case, ep_ranks
from helpers.ep_case import Case
from helpers.families import build_model, forward
from helpers.seeing import seen
from trimtab.integrations.transformers import LoadBalancer, register
from trimtab.integrations.transformers.routers.observe import Observed
from trimtab.routing.observers import Loads

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
    balance = LoadBalancer(model, **options)
    balance.micro_batches = MICRO
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept: dict[str, list[Any]] = {"ids": [], "loads": [], "biases": [], "losses": []}
    seeing = seen(model)
    share = SEQUENCES // size
    for step in batches():
        optimizer.zero_grad()
        targets = sum(int(mask[:, 1:].sum()) for _, mask in step)
        shares = [[t[rank * share : (rank + 1) * share] for t in micro] for micro in step]
        with balance.first_pass():
            for ids, mask in shares:
                wrapped(input_ids=ids, attention_mask=mask)
        for ids, mask in shares:
            logits = wrapped(input_ids=ids, attention_mask=mask).logits[:, :-1]
            decided = {name: run.ids_TK.view(*ids.shape, -1) for name, run in seeing.last.items()}
            kept["ids"].append({name: ids_BLK[mask.bool()] for name, ids_BLK in decided.items()})
            labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * size / targets
            loss.backward()
        optimizer.step()
        kept["loads"].append(balance.step())
        kept["losses"].append({name: float(value) for name, value in balance.losses.items()})
        kept["biases"].append({n: b.clone() for n, b in model.named_buffers() if n.endswith("bias")})
    return kept | {"parameters": dict(model.named_parameters())}


def trained(model: Any, options: dict[str, Any], micro_batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Two steps over the same micro-batches: the second one's gradients and all that both left to be seen."""
    balance, loads = LoadBalancer(model, **options), Loads()
    Observed(model, loads)
    balance.micro_batches = len(micro_batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept: dict[str, Any] = {"loads": [], "losses": [], "counted": [], "biases": []}
    for _ in range(2):
        model.zero_grad()
        for batch in micro_batches:
            (forward(model, batch)[1] / len(micro_batches)).backward()
        kept["grads"] = {name: ep_ranks.full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        kept["loads"].append(balance.step())
        kept["losses"].append({name: float(value) for name, value in balance.losses.items()})
        kept["counted"].append(torch.cat([*loads.take().values()]))
        kept["biases"].append({name: b.clone() for name, b in model.named_buffers() if name.endswith("bias")})
    return kept


def run_sharded(cases: list[Case], options: dict[str, dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Each case on this rank, its micro-batches a share of the global ones."""
    ep_ranks.quiet()
    ep_ranks.reduce_float64_like_float32()
    ep_ranks.shard_float64_whole()
    register()
    answers = []
    for case in cases:
        model = ep_ranks.load(case, folder)
        ep_ranks.prepare(case, model.train())
        if case.recompute == "reentrant":
            model.enable_input_require_grads()
        own = ep_case.batches(case, model, "natural", case.mesh.data_rank(dist.get_rank()))
        answers.append(trained(model, options[case.family], own))
    return answers


def alone(case: Case, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same in one process, with the micro-batches of all ranks as one."""
    model = build_model(case.family, case.seed, torch.float64).train()
    model.set_experts_implementation("eager")
    by_rank = [ep_case.batches(case, model, "natural", rank) for rank in range(case.mesh.data_ranks)]
    whole = [{key: torch.cat([one[key] for one in micro]) for key in micro[0]} for micro in zip(*by_rank, strict=True)]
    return trained(model, options[case.family], whole)
