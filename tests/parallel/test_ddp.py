"""DDP beside what its users do: replicas for averages of weights, experts that thaw, and what it takes no part in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.checkpoint import checkpoint

from helpers.comparing import relative_error
from helpers.layer_case import D, build
from helpers.ranks import run_ranks
from trimtab import update_bias
from trimtab.errors import ConfigError
from trimtab.parallel.ddp import ddp
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.routing.balance import routers


class Block(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe = nn.Linear(D, D), build(bias=True, router={"bias": True, "bias_rate": 0.25}, **more)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        losses: Tensor = self.moe(self.first(x)).y.square().sum()[None]
        return losses


class Layers(nn.Module):
    """Two layers, of which a call names those that it uses; again: each runs once more, in a backward within it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe, self.moe2 = nn.Linear(D, D), build(bias=True), build()

    def forward(self, x: Tensor, *used: str, again: bool = False) -> dict[str, list[Tensor]]:
        h = self.first(x)
        for moe in (getattr(self, name) for name in used):
            h = h + (checkpoint(lambda h, moe=moe: moe(h).y, h, use_reentrant=True) if again else moe(h).y)
        return {"loss": [h.square().sum()]}


def wrapped(
    *frozen: str, of: type[nn.Module] = Block, options: dict[str, Any] | None = None, **more: Any
) -> DistributedDataParallel:
    """Two ranks that hold all experts each."""
    model = of(**more)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("edp", "ep"))
    parallelize(model, mesh["ep"], {"moe*": ExpertParallel()})
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    return ddp(model, init_device_mesh("cpu", (2,)), mesh["edp"], **options or {})


def tokens(rank: int) -> Tensor:
    return torch.randn(4 + 4 * rank, D, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module, rank: int) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens(rank)).backward()
    return found_in(model)


def found_in(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("module."): getattr(t, "_local_tensor", t).clone() for name, t in found.items()}


def truth() -> dict[str, Tensor]:
    model = Block()
    each = [gradients(model, rank) for rank in (0, 1)]
    return {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}


def by_a_stage(model: DistributedDataParallel, rank: int) -> dict[str, Tensor]:
    """The only stage of a pipeline, two micro-batches."""
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rank", "pp"))["pp"].get_group()
    x = tokens(rank)
    given, taken = (x[::2],), (torch.zeros(1),)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=alone, input_args=given, output_args=taken)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, _: y.sum(), scale_grads=False)
    model.zero_grad()
    schedule.step(x, target=torch.zeros(2), losses=[])
    return found_in(model)


BOTH = ("moe", "moe2")
SKIPPED: dict[str, list[tuple[Sequence[str], Sequence[str]]]] = {
    "none": [(BOTH, BOTH)], "by the first rank": [((), BOTH)], "one layer by the second": [(BOTH, ["moe2"])],
    "one by all": [(["moe2"], ["moe2"])], "each rank another": [(["moe"], ["moe2"])],
    "in the last micro-batch": [(BOTH, ["moe"]), ((), ())], "all by all": [((), ())], "none again": [(BOTH, BOTH)],
}  # fmt: skip
"""By name: for each micro-batch the layers that each of two ranks uses."""


def skipping(rank: int) -> dict[str, float]:
    model, gaps = wrapped(of=Layers, options={"find_unused_parameters": True}), {}
    for name, (*first, last) in SKIPPED.items():
        one = Layers()
        for used in (*first, last):
            sum(one(tokens(r), *used[r])["loss"][0] / 2 for r in (0, 1)).backward()
        true = found_in(one)
        model.zero_grad()
        for used in first:
            with model.no_sync():
                model(tokens(rank), *used[rank])["loss"][0].backward()
        model(tokens(rank), *last[rank])["loss"][0].backward()
        found = found_in(model)
        assert found.keys() == true.keys(), (name, found.keys() ^ true.keys())
        gaps[f"skipped: {name}"] = max(relative_error(found[key], true[key]) for key in true)
    return gaps


def on_rank() -> dict[str, float | list[Tensor]]:
    rank, true, gaps = dist.get_rank(), truth(), {}

    def gap(model: nn.Module, found: dict[str, Tensor] | None = None) -> float:
        found = gradients(model, rank) if found is None else found
        assert found.keys() == true.keys()
        return max(relative_error(found[name], true[name]) for name in true)

    model = wrapped()
    with model.no_sync():
        alone = gradients(model, rank)
    assert relative_error(alone["moe.experts.gate_up"], true["moe.experts.gate_up"]) > 0.01
    model.module.seen.fill_(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch has nothing to warn of in how we call it
        gaps["as it is"] = gap(model)
    assert model.module.seen == rank, "buffers stay a rank's own"
    gaps["copy"] = gap(copy.deepcopy(model))
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5))
    average.update_parameters(model)
    gaps["average"] = gap(average.module)
    with model.no_sync():
        alone = gradients(model, rank)
    assert relative_error(alone["moe.experts.gate_up"], true["moe.experts.gate_up"]) > 0.01
    loss = model(tokens(rank))
    with torch.no_grad(), model.no_sync():
        model(tokens(5))
    model.zero_grad()
    loss.backward()
    gaps["evaluated in between"] = gap(model, found_in(model))
    x = tokens(rank).requires_grad_()
    loss = model(x)
    torch.autograd.grad(loss, x, retain_graph=True)
    model.zero_grad()
    with model.no_sync():
        loss.backward()
    gaps["after a gradient of the input"] = gap(model, found_in(model))
    deep, one = wrapped(of=Layers), Layers()
    loss = deep(tokens(rank), *BOTH, again=True)["loss"][0]
    with deep.no_sync():
        loss.backward()
    sum(one(tokens(r), *BOTH)["loss"][0] / 2 for r in (0, 1)).backward()
    of_deep = found_in(one)
    gaps["checkpointed"] = max(relative_error(found_in(deep)[name], of_deep[name]) for name in of_deep)
    gaps["stage"] = gap(model, by_a_stage(wrapped(), rank))
    delayed = wrapped(delay_wgrad=True)
    by_a_stage(delayed, rank)
    for _ in range(2):
        delayed.module.moe.experts.backward_dw()
    gaps["stage, delayed"] = gap(delayed, found_in(delayed))

    thawed = wrapped("moe.experts")
    assert not any(name.startswith("moe.experts") for name in gradients(thawed, rank))
    thawed.module.moe.experts.requires_grad_(True)
    gaps["thawed"] = gap(thawed)
    thawed.module.moe.experts.requires_grad_(False)
    assert not any(name.startswith("moe.experts") for name in gradients(thawed, rank))

    with pytest.raises(ConfigError, match="use fully_shard_moe"):
        wrapped("first", "moe.router")
    with pytest.raises(ConfigError, match="batches without tokens"), model.join():
        pass
    with pytest.raises(ConfigError, match="batches without tokens"), Join([model]):
        pass

    for fused in (first := wrapped(main_grad="accumulate"), copy.deepcopy(first)):
        experts = fused.module.moe.experts
        for name in experts.fused:
            experts.get_parameter(name).main_grad = torch.zeros_like(experts.get_parameter(name))
        fused(torch.randn(5, D)).backward()
        assert experts.gate_up.main_grad.any()
        assert experts.gate_up.grad is None, "a dummy"

    update_bias(model)
    model(torch.randn(3 + 40 * rank, D))
    loads = update_bias(model)["module.moe.router"]
    assert loads.sum() == (3 + 43) * 3
    gaps |= skipping(rank)
    return gaps | {"bias": [r.expert_bias.clone() for r in routers(model).values() if r.expert_bias is not None]}


def test_of_two_ranks() -> None:
    first, second = run_ranks(on_rank, 2, deadline=60.0)
    for a, b in zip(first.pop("bias"), second.pop("bias"), strict=True):
        assert torch.equal(a, b)
        assert (a != 0).any()
    for gaps in (first, second):
        assert set(gaps) == {
            *("as it is", "copy", "average", "thawed"),
            *("evaluated in between", "checkpointed", "stage", "stage, delayed"),
            "after a gradient of the input",
            *(f"skipped: {name}" for name in SKIPPED),
        }
        assert max(gaps.values()) < 2e-6, gaps
