"""`python -m benchmarks replay`: what `trimtab.record` and `trimtab.replay` cost on a layer of transformers.

A block of router and experts (Qwen3-MoE's, run by trimtab) in training, forward and backward. *recorded*: the contexts
are opened and the decisions taken out in every step; *told*: decisions are replayed in every step.

Legend: T tokens, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestant import Contestant
from benchmarks.layer_builds import qwen_block, registered
from benchmarks.layer_case import DTYPES
from benchmarks.step import first_is_right
from benchmarks.subject import BOTH, Subject, Where
from benchmarks.task import Task

WAYS = ("alone", "recorded", "told")


def replay_task(shape: tuple[int, int, int, int], *, tokens: int, dtype: str, threads: int) -> Task:
    """The same block in three ways."""
    args = {"shape": list(shape), "tokens": tokens, "dtype": dtype}
    contestants = [
        Contestant(
            name=way, role="ours" if way != "alone" else "peer", build=f"{__name__}:build", args=args | {"way": way},
            threads=threads,
        )
        for way in WAYS
    ]  # fmt: skip
    return Task(
        part="replay",
        case={"shape": list(shape), "tokens": tokens, "dtype": dtype, "threads": threads},
        contestants=contestants,
        modes=[BOTH],
        make_judge=lambda: first_is_right(1e-6),
    )


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: shape, tokens, dtype, way."""
    import trimtab

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

    def alone() -> Tensor:
        for tensor in (x_1TD, *weights):
            tensor.grad = None
        y: Tensor = model(x_1TD)
        y.backward(dy_1TD)  # type: ignore[no-untyped-call]
        return y.detach()

    def recorded() -> Tensor:
        with trimtab.record(model) as found:
            y = alone()
        found.decisions()
        return y

    def told() -> Tensor:
        with trimtab.replay(model, decisions):
            return alone()

    step = {"alone": alone, "recorded": recorded, "told": told}[args["way"]]

    def outcome() -> dict[str, Tensor]:
        y = step()
        return {"y": y} | {f"gradient {i}": t.grad for i, t in enumerate((x_1TD, *weights)) if t.grad is not None}

    return Subject(modes={BOTH: step}, outcome=outcome, judged=BOTH)
