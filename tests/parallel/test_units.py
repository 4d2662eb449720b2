"""What FSDP2 shards as units: any order of blocks, a router of another dtype, and what can be no unit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from helpers.comparing import full_value, relative_error
from helpers.layout_truth import D
from helpers.ranks import run_ranks
from parallel.test_selective import selecting
from trimtab.errors import ConfigError
from trimtab.moe import MoEConfig
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.parallel.grad_norm import clip_grad_norm_
from trimtab.routing.balance import update_bias
from trimtab.routing.config import RouterConfig


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        router = RouterConfig(num_experts=4, top_k=2, aux_loss=0.1)
        self.first = nn.Sequential(nn.Linear(D, D, dtype=dtype), nn.SiLU())
        self.moe = MoEConfig(dim=D, hidden=8, router=router, shared_hidden=6, dtype=dtype).build()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.moe(self.first(x))
        return x + out.y, out.losses["aux"]


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(dtype) for _ in range(2))

    def forward(self, x: Tensor, kept: list[str] | None = None) -> tuple[Tensor, Tensor]:
        losses = []
        for layer in self.layers:
            x, loss = layer(x) if kept is None else checkpoint(layer, x, **selecting(kept))
            losses.append(loss)
        return x, torch.stack(losses).sum()


def step(model: Model, x: Tensor, ranks: int, *args: Any) -> dict[str, Tensor]:
    """Two backwards: loads, the norm and the whole gradients of the mean loss."""
    for _ in range(2):
        y, losses = model(x, *args)
        (y.square().sum() / ranks + losses).backward()
    found = {name: full_value(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return found | update_bias(model) | {"norm": clip_grad_norm_(model, 1e9)}


NARROW = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
WAYS: dict[str, tuple[int, torch.dtype, dict[str, Any]]] = {
    "experts alone": (1, torch.float64, {}),
    "any order": (1, torch.float64, {"blocks": ("layers.0", "layers.*", "layers.*.first", "layers.*.moe.[er]*")}),
    "router": (2, torch.float32, {"mp_policy": NARROW}),
    "router of a block": (1, torch.float32, {"blocks": ("layers.*",), "reshard_after_forward": True}),
    "resharded to two": (1, torch.float64, {"blocks": ("layers.*",), "reshard_after_forward": 2}),
}
"""By name: ranks with the same experts, a router's dtype beside float64, options."""


def sharded_on_rank() -> dict[str, float]:
    warnings.simplefilter("error")
    x = torch.randn(2, 2, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    errors, rank = {}, dist.get_rank()
    for name, (copies, dtype, options) in WAYS.items():
        model = Model()
        for layer in model.layers:
            layer.moe.router.to(dtype)
        truth = step(copy.deepcopy(model), x.flatten(0, 1), 2)
        mesh = init_device_mesh("cpu", (copies, 2 // copies), mesh_dim_names=("edp", "ep"))
        parallelize(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})
        fully_shard_moe(model, init_device_mesh("cpu", (2,)), mesh["edp"], **options)
        kinds, computed_in = set[torch.dtype](), set[torch.dtype]()
        model.layers[0].moe.router.register_forward_pre_hook(lambda m, _, to=computed_in: to.add(m.weight.dtype))
        model.layers[0].moe.router.register_forward_hook(lambda _, __, out, to=kinds: to.add(out.weights_TK.dtype))
        for kept in (None, ["mm", "addmm"]):
            found = step(model, x[rank], 1, kept)
            assert found.keys() == truth.keys()
            for key, value in found.items():
                errors[f"{name} {kept} {key}"] = relative_error(value, truth[key])
            model.zero_grad()
        assert (kinds, computed_in) == ({torch.float64}, {dtype})
    model = Model(torch.bfloat16)
    parallelize(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})
    fully_shard_moe(model, init_device_mesh("cpu", (2,)), mesh["edp"])
    assert all(g.isfinite().all() for g in step(model, x[rank].bfloat16(), 1).values())
    return errors


def test_any_order_of_blocks_and_a_router_of_another_dtype_give_the_gradients_of_one_process() -> None:
    for errors in run_ranks(sharded_on_rank, 2, deadline=120.0):
        assert len(errors) > 100
        assert {name: error for name, error in errors.items() if not error <= 1e-6} == {}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, torch.dtype], str]] = {
    "none": ({"blocks": ("layers.*", "layer.*")}, {}, r"^blocks pattern 'layer\.\*' matches no module"),
    "inside": (
        {"blocks": ("layers.*.moe.shared",), "tokens": "replicated"}, {},
        r"^\[layer layers\.0\.moe\] .* 'layers\.0\.moe\.shared' in it is a unit of its own\. Name the layer",
    ),
    "router inside": (
        {"tokens": "sharded"}, {"layers.1.moe.router": torch.float32},
        r"^\[layer layers\.1\.moe\] .* in one dtype, and 'layers\.1\.moe\.router' in it .* build all in float32",
    ),
}  # fmt: skip
"""By name: options, modules of a dtype of their own, what is said."""


def refused_on_rank() -> None:
    dense = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    data = init_device_mesh("cpu", (2,))
    for options, dtypes, said in REFUSED.values():
        given, model = dict(options), Model()
        for name, dtype in dtypes.items():
            model.get_submodule(name).to(dtype)
        tokens = {"tokens": given.pop("tokens"), "tp_mesh": dense["tp"]} if "tokens" in options else {}
        parallelize(model, dense["tp"], {"layers.*.moe": ExpertParallel(**tokens)})
        with pytest.raises(ConfigError, match=said):
            fully_shard_moe(model, dense["dp"] if tokens else data, dense["dp"], **given)
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
        assert all(layer.moe.token_meshes.data is None for layer in model.layers)


def test_what_can_be_no_unit_is_named_and_nothing_is_changed() -> None:
    run_ranks(refused_on_rank, 2)
