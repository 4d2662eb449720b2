"""Steps of Megatron's optimizers: its parameters are gathered before our experts read them, and are those of its own
experts; of one parameter for all experts, or one each; with experts that are frozen.

Legend: E experts.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.megatron_case import Case, config_of, input_of, layer_of, parameters_of
from helpers.megatron_cpu import megatron, megatron_ranks, spec_utils
from trimtab.integrations.megatron.experts import Experts

STEPS, MICRO = 3, 2
EACH = spec_utils.ModuleSpec(module=Experts, params={"single_parameter": False})
KINDS: dict[str, dict[str, Any]] = {"Megatron's": {"experts": False}, "one": {}, "each": {"experts": EACH}}
CASE = Case(tokens=[(5, 2), (3, 1), (4, 2), (2, 2)])


def steps_of(case: Case, distributed: bool, overlap: bool) -> dict[str, Tensor]:
    """The parameters of this rank behind some steps, and the norms of gradients."""
    config = config_of(case)
    layer = layer_of(case, config)
    core = megatron.core
    options = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap, "bucket_size": 600}
    ddp = core.distributed.DistributedDataParallelConfig(use_distributed_optimizer=distributed, **options)
    model = core.distributed.DistributedDataParallel(config, ddp, layer)
    settings = core.optimizer.OptimizerConfig(
        optimizer="adam", lr=0.02, clip_grad=0.5, weight_decay=0.1, use_distributed_optimizer=distributed,
        overlap_param_gather=overlap, bf16=config.bf16, params_dtype=config.params_dtype,
    )  # fmt: skip
    optimizer = core.optimizer.get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    norms = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for micro in range(MICRO):
            given = input_of(case, dist.get_rank(), step * MICRO + micro)
            with model.no_sync() if micro + 1 < MICRO else nullcontext():
                y, _ = model(given.x_SBH.requires_grad_())
                y.backward(given.dy_SBH)
        model.finish_grad_sync()
        norms.append(float(optimizer.step()[1]))
    if overlap:
        model.start_param_sync(force_sync=True)
    names = ("linear_fc1", "linear_fc2")
    found = {name: torch.stack([param.detach() for param in parameters_of(layer, name)]) for name in names}
    return found | {"router": layer.router.weight.detach(), "norms": torch.tensor(norms)}


def all_steps(case: Case) -> dict[tuple[str, bool, bool], dict[str, Tensor]]:
    return {
        (kind, distributed, overlap): steps_of(replace(case, use=use), distributed, overlap)
        for (kind, use), distributed, overlap in product(KINDS.items(), (False, True), (False, True))
        if distributed or not overlap
    }


@pytest.mark.parametrize(
    ("world", "sizes", "frozen"),
    [
        (2, {"ep": 1}, ()),
        pytest.param(4, {"ep": 2}, (), marks=pytest.mark.megatron_full),
        pytest.param(4, {"ep": 2, "etp": 2}, (), marks=pytest.mark.megatron_full),
        pytest.param(4, {"ep": 2}, ("experts.linear_fc1", "experts.local_experts"), marks=pytest.mark.megatron_full),
    ],
)
def test_steps_are_those_of_megatrons_experts(world: int, sizes: dict[str, int], frozen: tuple[str, ...]) -> None:
    case = replace(CASE, sizes=sizes, frozen=frozen)
    for found in megatron_ranks(all_steps, world, case, deadline=150.0, **sizes):
        for (kind, distributed, overlap), mine in found.items():
            reference = found["one" if frozen else "Megatron's", distributed, False]
            for name, value in mine.items():
                if kind == "Megatron's" and frozen:
                    continue
                assert not value.isnan().any()  # a step moves a parameter by about 2e-2
                assert (value - reference[name]).abs().max() <= 1e-5, (kind, distributed, overlap, name)
