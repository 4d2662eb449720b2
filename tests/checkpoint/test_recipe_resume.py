"""Recipes whose state is each rank's own: what follows a resume is what would have followed, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from helpers.ranks import run_ranks
from trimtab.checkpoint import load, save
from trimtab.experts.recipes import NVFP4, FP8Delayed
from trimtab.experts.recipes.base import Recipe
from trimtab.moe import MoEConfig
from trimtab.parallel.ddp import ddp
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.routing.config import RouterConfig

D, F, E = 32, 64, 4
RECIPES: dict[str, Recipe] = {
    "fp8_delayed": FP8Delayed(backend="emulated", history=4),
    "nvfp4": NVFP4(backend="emulated"),
}
MESHES = {"copies": (2, 1, 1), "shares": (1, 2, 1), "experts": (1, 1, 2)}
"""edp, etp, ep."""


class Model(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        router = RouterConfig(num_experts=E, top_k=2)
        self.moe = MoEConfig(dim=D, hidden=F, router=router, recipe=recipe).build()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(x).y
        return y


class Run:
    def __init__(self, recipe: Recipe, layout: str, seed: int) -> None:
        torch.manual_seed(0)
        self.model = Model(recipe)
        torch.manual_seed(seed + dist.get_rank())  # of the states that the ranks' shares get
        mesh = init_device_mesh("cpu", MESHES[layout], mesh_dim_names=("edp", "etp", "ep"))
        parallelize(self.model, mesh["etp", "ep"], {"moe": ExpertParallel(etp="etp")})
        self.runner = ddp(self.model, init_device_mesh("cpu", (2,)), mesh["edp"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, number: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(10 * number + dist.get_rank())
        y = self.runner(torch.randn(24, D, generator=g) * (1 + 3 * dist.get_rank() * number))
        y.square().mean().backward()
        assert y.isfinite().all()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = [y.detach(), *((g.to_local() if isinstance(g, DTensor) else g).clone() for g in grads)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def on_rank(root: Path) -> dict[str, list[bool]]:
    cases = itertools.product(RECIPES, MESHES)
    return {f"{recipe} {layout}": resumed(root / recipe / layout, recipe, layout) for recipe, layout in cases}


def resumed(root: Path, recipe: str, layout: str) -> list[bool]:
    run = Run(RECIPES[recipe], layout, 100)
    for number in range(2):
        run.step(number)
    folder = save(root, run.model, run.optimizer, step=2)
    want = run.step(2) + run.step(3)
    again = Run(RECIPES[recipe], layout, 200)
    load(folder, again.model, again.optimizer)
    found = again.step(2) + again.step(3)
    return [torch.equal(a, b) for a, b in zip(want, found, strict=True)]


@pytest.mark.xdist_group("ranks2")
def test_what_follows_has_the_same_bits(tmp_path: Path) -> None:
    for found in run_ranks(on_rank, 2, tmp_path):
        assert len(found) == 6
        assert all(len(same) == 8 and all(same) for same in found.values()), found
