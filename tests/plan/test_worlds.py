"""Models of one's own in a world without values: what a rank holds is its share, in every way that spreads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import init_device_mesh

import trimtab
from trimtab.dispatch.planned import planned
from trimtab.errors import ConfigError
from trimtab.kernels.torch_mm import GroupedMMBackend
from trimtab.plan.ledger import Ledger
from trimtab.plan.traffic import Traffic
from trimtab.plan.without_values import World

D, HIDDEN, E, LAYERS, RANKS = 64, 32, 8, 3, 4
EXPERTS = 4 * LAYERS * E * 3 * D * HIDDEN
DENSE = 4 * LAYERS * (D * D + D + E * D)


class Block(nn.Module):
    def __init__(self, dim: int = D, hidden: int = HIDDEN, experts: int = E, dense: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim) if dense else nn.Identity()
        router = trimtab.RouterConfig(num_experts=experts, top_k=2)
        config = trimtab.MoEConfig(dim=dim, hidden=hidden, router=router, dtype=torch.float32, kernels="grouped_mm")
        self.moe = config.build("moe")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.linear(x)).y
        return y


def over(mesh: object, model: nn.Module, transport: str = "planned", **options: object) -> None:
    layers = trimtab.ExpertParallel(transport=transport, **options)  # type: ignore[arg-type]
    trimtab.parallelize(model, mesh, {"*.moe": layers})  # type: ignore[arg-type]


def by_experts(model: nn.Module, transport: str = "planned") -> None:
    over(init_device_mesh("cpu", (dist.get_world_size(),)), model, transport)


def split(model: nn.Module, transport: str = "planned") -> None:
    over(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp")), model, transport, etp="etp")


def replicated(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    over(mesh, model, tokens="replicated", tp_mesh=mesh)


def sharded(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    over(mesh["ep"], model)
    trimtab.fully_shard_moe(model, init_device_mesh("cpu", (RANKS,)), mesh["efsdp"], blocks=["*"])


WAYS: dict[str, tuple[int, Callable[[nn.Module], None], int]] = {
    "alone": (1, lambda model: None, EXPERTS + DENSE),
    "ep": (RANKS, by_experts, EXPERTS // RANKS + DENSE),
    "ep x etp": (RANKS, split, EXPERTS // RANKS + DENSE),
    "tokens of a tp group": (RANKS, replicated, EXPERTS // RANKS + DENSE),
    "fully_shard_moe": (RANKS, sharded, (EXPERTS + DENSE) // RANKS),
}


@pytest.mark.parametrize(("way", "device"), [*((way, "meta") for way in WAYS), ("ep", "cpu")])
def test_a_rank_holds_its_share(way: str, device: str) -> None:
    ranks, spread, weights = WAYS[way]
    with World(ranks) as world, planned(Traffic(skew="even")):
        with torch.device(device):
            model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        spread(model)
        world.fill(model)
        assert all(map(is_fake, model.parameters()))
        with world.mode, Ledger(kernels=lambda _: GroupedMMBackend()) as ledger:
            ledger.know(model.parameters(), "weights")
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for _ in range(2):
                model(torch.randn(2, 16, D)).sum().backward()
                before, _ = ledger.clock, optimizer.step()
    at = ledger.categories(before)
    assert at["weights"] == weights
    assert at["gradients"] == weights
    assert 2 * weights < at["moments"] < 2 * weights + 1024, "and the number of steps of each"
    traveled = any(ledger.category(storage) == "exchange" for storage in ledger.storages)
    assert traveled == (ranks > 1)


def test_a_world_is_the_only_one() -> None:
    with World(2), pytest.raises(ConfigError, match="process group"), World(2):
        pass
    assert not dist.is_initialized()
