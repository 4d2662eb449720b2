"""Adapters in a training: accumulated, clipped, with dropout recomputed, under HSDP, saved and loaded in one process.

The truth is one process with the same layers over all ranks' tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import trimtab
from helpers.ranks import run_ranks
from trimtab.checkpoint.save_load import load, save

E, D, F = 4, 16, 24
TOKENS = ((7, 5), (0, 9), (4, 0), (6, 6))
"""Of each rank, in each micro-batch."""
NORM = 0.5
"""What gradients are clipped to."""


class Blocks(nn.Module):
    """Two layers, and what `way` does with each: "", "reentrant" or "not reentrant"."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        router = trimtab.RouterConfig(num_experts=E, top_k=2)
        config = trimtab.MoEConfig(dim=D, hidden=F, router=router, dtype=torch.float64)
        self.layers = nn.ModuleList(config.build(layer=f"layers.{i}") for i in range(2))
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:

            def block(h: Tensor, layer: nn.Module = layer) -> Tensor:
                y: Tensor = layer(h).y
                return h + y

            if self.way == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.way:
                x = checkpoint(block, x, use_reentrant=False, context_fn=trimtab.replay_in_recompute)
            else:
                x = block(x)
        return x


def adapted(dropout: float = 0.0) -> Blocks:
    """Three adapters: of each expert, shared by all, and one that is idle; b is not where it begins, at zero."""
    model = Blocks()
    g = torch.Generator().manual_seed(2)
    for name, shared in (("own", False), ("shared", True), ("idle", False)):
        for param in trimtab.add_adapter(model, name, rank=3, shared=shared, dropout=dropout):
            with torch.no_grad():
                param.copy_(torch.randn(param.shape, generator=g, dtype=torch.float64) / 4)
    trimtab.set_adapter(model, "own", "shared")
    return model


def rows(rank: int, batch: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * rank + batch)
    return torch.randn(TOKENS[rank][batch], D, dtype=torch.float64, generator=g).requires_grad_()


def backward(model: nn.Module, rank: int, batch: int, scale: float) -> Tensor:
    x = rows(rank, batch)
    (scale * model(x).square().sum()).backward()
    assert x.grad is not None
    return x.grad


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of what has some, whole."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in found.items()}


def truth(ranks: int, divisor: float) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients of all ranks' two micro-batches, clipped, and their norm before."""
    model = adapted()
    for rank in range(ranks):
        for batch in range(2):
            backward(model, rank, batch, 1 / divisor)
    norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
    return gradients(model), norm


def same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert not any("idle" in name for name in wanted)
    assert sum("adapters" in name for name in wanted) == 16
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)


def two_ranks(folder: Path) -> dict[str, Tensor]:
    """EP over two ranks, over two micro-batches; dropout draws the same in each kind of recompute."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), dist.get_rank()

    def spread(dropout: float = 0.0) -> Blocks:
        model = adapted(dropout)
        trimtab.parallelize(model, mesh, {"layers.*": trimtab.ExpertParallel()})
        return model

    model = spread()
    for batch in range(2):
        backward(model, rank, batch, 1.0)
    for router in (p for name, p in model.named_parameters() if "router" in name):
        dist.all_reduce(router.grad)
    norm = trimtab.clip_grad_norm_(model, NORM)
    found = gradients(model) | {"norm": norm}
    dropped = []
    for way in ("", "reentrant", "not reentrant"):
        model = spread(dropout=0.4)
        model.way = way
        torch.manual_seed(rank)
        dx = backward(model, rank, 1, 1.0)
        dropped.append(gradients(model) | {"x": dx})
    assert not torch.equal(dropped[0]["x"], backward(spread(), rank, 1, 1.0)), "rows were dropped"
    for again in dropped[1:]:
        assert all(torch.equal(value, again[name]) for name, value in dropped[0].items()), "the same masks"
    model = spread()
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.mul_(2)
    save(folder, model, step=1)
    return found


def test_accumulation_clipping_dropout_and_saving_over_two_ranks(tmp_path: Path) -> None:
    """In a norm what is shared over EP counts once."""
    wanted, norm = truth(2, 1.0)
    for got in run_ranks(two_ranks, 2, tmp_path):
        torch.testing.assert_close(got.pop("norm").double(), norm, rtol=1e-6, atol=0)
        same(got, wanted)
    model = adapted()
    saved = {name: 2 * p for name, p in model.named_parameters()}
    load(tmp_path, model)
    assert sum("idle" in name for name in saved) == 8
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters()), "one process reads what two wrote"


def hybrid() -> dict[str, Tensor]:
    """HSDP: two replicas of two ranks that share experts; reduced once, after the second micro-batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "ep"))
    model = adapted()
    trimtab.parallelize(model, mesh["ep"], {"layers.*": trimtab.ExpertParallel()})
    sharded = trimtab.fully_shard_moe(model, mesh, mesh["replicate"])
    for batch in range(2):
        sharded.set_requires_gradient_sync(batch == 1)
        backward(sharded, dist.get_rank(), batch, 1.0)
    norm = trimtab.clip_grad_norm_(sharded, NORM)
    return gradients(sharded) | {"norm": norm}


@pytest.mark.xdist_group("ranks4")
def test_hsdp_with_accumulation_and_clipping() -> None:
    wanted, norm = truth(4, 4.0)
    for got in run_ranks(hybrid, 4):
        torch.testing.assert_close(got.pop("norm").double(), norm, rtol=1e-6, atol=0)
        same(got, wanted)
