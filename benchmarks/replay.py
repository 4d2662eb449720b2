"""`python -m benchmarks replay`: what watching and telling routers costs on a layer of transformers.

A block of router and experts (Qwen3-MoE's, run by trimtab) in training, forward and backward, in four ways that take
turns in one process, on the same weights and memory, for they are apart by less than two processes are. *recorded*: a
context of `trimtab.record` is opened and its decisions taken out in every step; *counted*: loads as `LoadCallback` has
them, too; *told*: decisions are replayed in every step. All give the same bits.

Legend: T tokens, D model dim.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestant import Contestant
from benchmarks.layer_builds import qwen_block, registered
from benchmarks.layer_case import DTYPES
from benchmarks.subject import Subject, Where
from benchmarks.task import Task

ALONE, TURNS = "alone", "turns"


def replay_task(shape: tuple[int, int, int, int], *, tokens: int, dtype: str, threads: int) -> Task:
    """One block in four ways."""
    args = {"shape": list(shape), "tokens": tokens, "dtype": dtype}
    contestant = Contestant(name="trimtab", role="ours", build=f"{__name__}:build", args=args, threads=threads)
    return Task(
        part="replay",
        case={"shape": list(shape), "tokens": tokens, "dtype": dtype, "threads": threads, "against": ALONE},
        contestants=[contestant],
        modes=[TURNS],
    )


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: shape, tokens, dtype."""
    import trimtab
    from trimtab.integrations.transformers.routers.observe import Observed
    from trimtab.routing.observers import Loads

    dim, hidden, experts, top_k = args["shape"]
    block = qwen_block(dim, hidden, experts, top_k, registered())
    model = nn.Sequential(block).to(DTYPES[args["dtype"]])
    weights = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    for seed, weight in enumerate(weights):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    shape = (1, args["tokens"], dim)
    x_1TD = torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(DTYPES[args["dtype"]]).requires_grad_()
    dy_1TD = torch.ones_like(x_1TD)
    with trimtab.record(model) as recording:
        model(x_1TD)
    decisions = recording.decisions()

    def alone() -> dict[str, Tensor]:
        for tensor in (x_1TD, *weights):
            tensor.grad = None
        y: Tensor = model(x_1TD)
        y.backward(dy_1TD)  # type: ignore[no-untyped-call]
        return {"y": y.detach()} | {
            f"gradient {i}": t.grad for i, t in enumerate((x_1TD, *weights)) if t.grad is not None
        }

    def recorded() -> dict[str, Tensor]:
        with trimtab.record(model) as found:
            outcome = alone()
        assert torch.equal(found.decisions().ids, decisions.ids)
        return outcome

    def told() -> dict[str, Tensor]:
        with trimtab.replay(model, decisions):
            return alone()

    ways = {ALONE: alone, "recorded": recorded, "recorded, counted": recorded, "told": told}
    turn = itertools.count()

    def step() -> dict[str, float]:
        seconds = {}
        for way in list(ways)[:: 1 if next(turn) % 2 else -1]:
            loads = Observed(model, Loads()) if "counted" in way else None
            start = time.perf_counter()
            ways[way]()
            seconds[way] = time.perf_counter() - start
            if loads is not None:
                loads.remove()
        return {way: seconds[way] for way in ways}

    wanted = {name: t.clone() for name, t in alone().items()}
    for way in ways.values():
        for name, tensor in way().items():
            assert torch.equal(tensor, wanted[name]), name
    return Subject(modes={TURNS: step})
