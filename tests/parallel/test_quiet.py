"""Torch has nothing to warn of in how we call it."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from helpers.ranks import preload, run_ranks
from trimtab.moe import MoEConfig
from trimtab.parallel.ddp import ddp
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.routing.config import RouterConfig

preload("torch._dynamo", "torch.distributed.fsdp", "trimtab.parallel.fsdp", "trimtab.parallel.ddp")


class Model(nn.Module):
    """A layer and a buffer that every rank changes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoEConfig(dim=8, hidden=8, router=RouterConfig(num_experts=4, top_k=2)).build()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(x).y
        return y


def on_rank() -> list[float]:
    warnings.simplefilter("error")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))
    seen = []
    for spread in (ddp, fully_shard_moe):
        model = Model()
        parallelize(model, mesh["ep"], {"moe": ExpertParallel()})
        runner = spread(model, init_device_mesh("cpu", (2,)), mesh["edp"])  # type: ignore[operator]
        model.seen.fill_(dist.get_rank())
        for _ in range(2):
            runner(torch.randn(3, 8)).sum().backward()
        seen.append(model.seen.item())
    return seen


def test_nothing_warns_and_buffers_stay_a_rank_s_own() -> None:
    assert run_ranks(on_rank, 2, deadline=90.0) == [[0.0] * 2, [1.0] * 2]
