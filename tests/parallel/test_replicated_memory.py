"""Replicated experts hold replicas, their gradients while they go home, and nothing as large as a rank's experts:
measured on two ranks where every token goes to the first one's experts.

Legend: E experts, e at home on each rank, T tokens, D model dim, F expert hidden dim.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import trimtab
from helpers.ranks import run_ranks
from trimtab.plan.ledger import Ledger

E, D, F, T = 8, 256, 512, 8
COPY = 3 * D * F * 4
"""Bytes of an expert."""
ODD = 0.3
"""Of a replica's bytes: rows, pre-activations and indices, which are elsewhere than without replicas."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of tensors, above what was there before. kept: between forward and backward. replicas: of this rank."""

    forward: int
    kept: int
    backward: int
    replicas: int


def held(replicate_experts: Any, again: bool, main_grad: bool) -> Held:
    """One step of a layer that has run before."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    router = trimtab.RouterConfig(num_experts=E, top_k=1)
    mode = "accumulate" if main_grad else "off"
    config = trimtab.MoEConfig(dim=D, hidden=F, router=router, dtype=torch.float32, main_grad=mode)
    moe = config.build("moe")
    mesh = init_device_mesh("cpu", (2,))
    trimtab.parallelize(moe, mesh, {"": trimtab.ExpertParallel(replicate_experts=replicate_experts, copy_cost=0)})
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    ids = torch.arange(T)[:, None] % (E // 2)
    weights = (moe.experts.gate_up, moe.experts.down)
    for param in weights:
        param.main_grad = torch.zeros_like(param)

    def forward() -> torch.Tensor:
        def layer(x: torch.Tensor) -> torch.Tensor:
            return moe(x, ids=ids).y * 1.0

        if not again:
            return layer(x)
        y: torch.Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=trimtab.replay_in_recompute)
        return y

    forward().sum().backward()  # self-tests, and pools that have seen the sizes
    moe.zero_grad()
    x.grad = None
    gc.collect()
    known = [x, ids, *moe.parameters(), *moe.buffers(), *(p.to_local() for p in weights)]
    known += [t.to_local() for t in (p.main_grad for p in weights)]
    with Ledger() as live:
        live.know(known)
        y = forward()
        first, kept, since = live.peak()[0], live.now, live.clock
        y.sum().backward()
    report = moe.dispatcher.replicated
    replicas = 0 if report is None else int(report.replicas_P[rank])
    return Held(forward=first, kept=kept, backward=live.peak(since)[0], replicas=replicas)


def on_rank(main_grad: bool) -> list[tuple[Held, Held]]:
    """Plain and replicated; kept, and recomputed."""
    return [(held("off", again, main_grad), held(0.0, again, main_grad)) for again in (False, True)]


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_two_copies_of_four_experts(main_grad: bool) -> None:
    donor, receiver = run_ranks(on_rank, 2, main_grad)
    for rank, found in enumerate((donor, receiver)):
        for again, (plain, replicated) in enumerate(found):
            replicas = 2 * rank
            assert replicated.replicas == replicas
            forward, kept, backward = (
                (getattr(replicated, when) - getattr(plain, when)) / COPY for when in ("forward", "kept", "backward")
            )
            assert abs(kept - (0 if again else replicas)) <= ODD, "replicas, and none under recompute"
            assert forward <= 2 + ODD, "what leaves or comes"
            assert backward <= 2 * replicas + ODD if rank else backward <= 2 + ODD, "gradients of what left or came"
