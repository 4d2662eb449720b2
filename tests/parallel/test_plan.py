"""Plans that match nothing or twice are refused; a router that drifted is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel.layout_truth import Model
from trimtab.errors import ConfigError, DesyncError
from trimtab.layer import MoE, MoEConfig, MoEOutput
from trimtab.parallel.plan import matches, parallelize
from trimtab.parallel.replicas import check_replicated
from trimtab.parallel.style import ExpertParallel
from trimtab.routing.config import RouterConfig
from trimtab.verify.ranks import run_ranks


def refused(plan: dict[str, ExpertParallel]) -> str:
    with pytest.raises(ConfigError) as caught:
        parallelize(Model(torch.float32), init_device_mesh("cpu", (2,)), plan)
    return str(caught.value)


class Doubled(MoE):
    """A layer whose own forward would be lost."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> MoEOutput:
        out = super().forward(x, **kwargs)
        return out._replace(y=2 * out.y)


def refused_subclass() -> str:
    layer = Doubled(MoEConfig(dim=8, hidden=8, router=RouterConfig(num_experts=2, top_k=1)))
    with pytest.raises(ConfigError) as caught:
        parallelize(layer, init_device_mesh("cpu", (2,)), {"": ExpertParallel()})
    return str(caught.value)


def on_rank() -> dict[str, str]:
    style = ExpertParallel()
    said = {
        "near": refused({"layer.*.moe": style}),
        "twice": refused({"layers.*.moe": style, "layers.0.*": style}),
        "kind": refused({"layers.0.moe.router": style}),
        "subclass": refused_subclass(),
    }
    torch.manual_seed(1)
    model = parallelize(Model(torch.float32), init_device_mesh("cpu", (2,)), {"layers.*.moe": style})
    check_replicated(model)  # experts differ between the ranks, as they should
    with torch.no_grad():
        router = model.get_parameter("layers.1.moe.router.weight")
        router[0, 0] += dist.get_rank() * 1e-6
    with pytest.raises(DesyncError) as drifted:
        check_replicated(model)
    with pytest.raises(ConfigError, match="before"):
        parallelize(model, init_device_mesh("cpu", (2,)), {"layers.*.moe": style})
    a, b = (model.get_submodule(f"layers.{i}.moe").dispatcher for i in (0, 1))
    return said | {"drift": str(drifted.value), "shared": str(a.transport is b.transport), "layer": str(a.layer)}


def test_what_is_wrong_is_named() -> None:
    for said in run_ranks(on_rank, 2):
        assert "'layer.*.moe' matches no module" in said["near"]
        assert "layers.0.moe" in said["near"]
        assert "'layers.0.moe' is matched twice" in said["twice"]
        assert "not Router" in said["kind"]
        assert "not Doubled" in said["subclass"]
        assert "layers.1.moe.router.weight (rank(s) [0]" in said["drift"]
        assert "layers.0" not in said["drift"]
        assert (said["shared"], said["layer"]) == ("True", "layers.0.moe")


def test_a_star_stays_within_its_part() -> None:
    assert matches("layers.3.moe", "layers.*.moe")
    assert not matches("layers.3.block.moe", "layers.*.moe")
    assert not matches("layers.3", "layers.*.moe")
    assert matches("moe", "*")
    assert matches("", "")
    assert not matches("", "*")


def test_tokens_and_mesh_go_together() -> None:
    with pytest.raises(ConfigError, match="tp_mesh"):
        ExpertParallel(tokens="sharded")
    with pytest.raises(ConfigError, match="transport"):
        ExpertParallel(transport="pigeon")  # type: ignore[arg-type]
