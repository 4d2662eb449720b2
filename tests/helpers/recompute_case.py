"""Layers full of near-ties whose router rounds differently when a forward runs again inside a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab.routing.router as router_module
from trimtab.autograd import in_backward
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.options import ReplicationConfig
from trimtab.moe import MoE, MoEConfig
from trimtab.routing.config import RouterConfig
from trimtab.routing.recompute import replay_in_recompute

D, E, K, T = 8, 8, 3, 12


def twins(**more: Any) -> MoE:
    """Experts 2j and 2j + 1 have the same router weights: every token has a tie at the border of its K = 3 picks."""
    router = RouterConfig(**{"num_experts": E, "top_k": K, "score": "sigmoid", "aux_loss": 0.1} | more)
    moe = MoEConfig(dim=D, hidden=6, router=router, dtype=torch.float64).build("twins")
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) / p.shape[-1] ** 0.5)
        moe.router.weight[1::2] = moe.router.weight[::2]
    return moe


@contextmanager
def perturbed() -> Iterator[list[bool]]:
    """In a backward logits come out a hair larger for odd experts, so that every tie falls the other way.

    Gives, for each routing, whether it was a recomputation.
    """
    exact, log = router_module.router_logits, []

    def rough(x: Tensor, weight: Tensor) -> Tensor:
        log.append(in_backward())
        logits = exact(x, weight)
        return logits + 1e-9 * in_backward() * (torch.arange(logits.shape[1]) % 2)

    router_module.router_logits = rough
    try:
        yield log
    finally:
        router_module.router_logits = exact


class Block(nn.Module):
    """Something with a saved tensor before and behind the layer, as in a transformer."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.norm = nn.RMSNorm(D, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.moe(self.norm(x))
        y = x + torch.tanh(out.y)
        return y, sum(out.losses.values(), torch.zeros((), dtype=torch.float64))


def run(block: Block, x: Tensor, replay: bool) -> Tensor:
    """The loss of one micro-batch. replay: under a checkpoint that replays decisions."""
    y, aux = checkpoint(block, x, use_reentrant=False, context_fn=replay_in_recompute) if replay else block(x)
    return y.square().sum() + aux


def compare(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, true in truth.items():
        assert (ours[name] - true).abs().max() < 1e-7, name  # what is left is the perturbation of the weights


def grads(model: nn.Module, xs: list[Tensor]) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()} | {f"x{i}": x.grad for i, x in enumerate(xs)}
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def micro_batches(count: int, seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(T, D, generator=g, dtype=torch.float64).requires_grad_() for _ in range(count)]


def on_ranks() -> dict[str, float]:
    """Two expert-parallel ranks, one of which rounds differently on its second run: gradients as without recompute,
    with replicated experts, too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for replay, replication in ((False, None), (True, None), (True, ReplicationConfig(tolerance=0.0, copy_cost=0))):
        block = Block(twins())
        moe, e = block.moe, E // ranks
        for name in ("gate_up", "down"):
            setattr(moe.experts, name, nn.Parameter(getattr(moe.experts, name)[rank * e : rank * e + e].detach()))
        moe.experts.num_experts = e
        moe.dispatcher = Dispatcher(E, AllToAll(dist.group.WORLD), layer="twins", replication=replication)
        xs = micro_batches(1, seed=5 + rank)
        with perturbed() if rank == 0 else nullcontext():
            run(block, xs[0], replay).backward()
        found.append(grads(block, xs))
    return {
        f"{name} {way}": float((found[0][name] - again[name]).abs().max())
        for way, again in enumerate(found[1:])
        for name in found[0]
    }
