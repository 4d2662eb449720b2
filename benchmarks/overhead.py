"""`python -m benchmarks overhead`: what the host does around the products, for 4 tokens.

D 256, F 128, 8 experts, K 2, float32, one thread. Contestants: trimtab in transformers' block and trimtab's own `MoE`,
and transformers' block with "grouped_mm"; a block is router and experts.

Legend: T tokens, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.contestant import Contestant
from benchmarks.layer_builds import qwen_block, registered
from benchmarks.step import first_is_right
from benchmarks.subject import BOTH, FORWARD, Subject, Where
from benchmarks.task import Task

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 4, 256, 128, 8, 2
NO_GRAD = "no_grad"


def overhead_task(*, against: str = "") -> Task:
    """against: the `src` folder of another checkout of trimtab, whose contestants are called "before"."""
    peer = Contestant(name="transformers, grouped_mm", role="peer", build=f"{__name__}:build_block")
    contestants = [Contestant(**vars(peer) | {"args": {"experts": "grouped_mm"}})]
    for source in ("", against) if against else ("",):
        before = " before" if source else ""
        for name, build in (("trimtab in transformers", "build_block"), ("trimtab's MoE", "build_moe")):
            contestants.append(
                Contestant(
                    name=name + before,
                    role="ours",
                    build=f"{__name__}:{build}",
                    args={"experts": "trimtab"},
                    source=source,
                )
            )
    return Task(
        part="overhead",
        case={"tokens": TOKENS, "dtype": "fp32", "threads": 1},
        contestants=contestants,
        modes=[FORWARD, BOTH, NO_GRAD],
        make_judge=lambda: first_is_right(1e-5),
    )


def build_block(args: dict[str, Any], where: Where) -> Subject:
    """args: experts."""
    experts = registered() if args["experts"] == "trimtab" else args["experts"]
    block = qwen_block(DIM, HIDDEN, EXPERTS, TOP_K, experts)
    return subject(block, [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj])


def build_moe(args: dict[str, Any], where: Where) -> Subject:
    """args: none that matter."""
    import trimtab

    router = trimtab.RouterConfig(num_experts=EXPERTS, top_k=TOP_K, normalize=True)
    moe: Any = trimtab.MoEConfig(dim=DIM, hidden=HIDDEN, router=router).build()
    return subject(moe, [moe.router.weight, *moe.experts.parameters()])


def subject(module: Any, weights: list[Tensor]) -> Subject:
    """weights: the router's, gate and up, down; filled here alike, whatever their shapes."""
    for seed, weight in enumerate(weights):
        flat = torch.randn(weight.numel(), generator=torch.Generator().manual_seed(seed)) * 0.05
        with torch.no_grad():
            weight.copy_(flat.view_as(weight))
    x_1TD = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(9)).requires_grad_()
    dy_1TD = torch.ones(1, TOKENS, DIM)

    def forward() -> Tensor:
        found = module(x_1TD)
        if hasattr(found, "y"):
            found = found.y
        y: Tensor = found[0] if isinstance(found, tuple) else found
        return y

    def both() -> None:
        for tensor in (x_1TD, *weights):
            tensor.grad = None
        forward().backward(dy_1TD)  # type: ignore[no-untyped-call]

    def no_grad() -> None:
        with torch.no_grad():
            forward()

    def outcome() -> dict[str, Tensor]:
        both()
        grads = [tensor.grad.flatten() for tensor in (x_1TD, *weights) if tensor.grad is not None]
        return {"y": forward().detach().flatten()} | {f"gradient {i}": grad for i, grad in enumerate(grads)}

    return Subject(modes={FORWARD: forward, BOTH: both, NO_GRAD: no_grad}, outcome=outcome, judged=BOTH)
