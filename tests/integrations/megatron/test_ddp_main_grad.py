"""What Megatron's DDP finds in `main_grad` after two micro-batches is the dense truth over the data-parallel size, in a
second step too; fused or not, delayed or not, overlapped or not."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.megatron_case import Case, config_of, input_of, layer_of, of_kind, parameters_of, share, truth, watch
from helpers.megatron_cpu import megatron, megatron_ranks

STEPS = 2
CASE = Case(tokens=[(6, 2), (0, 2), (3, 1), (1, 1)], steps=2)
OPTIONS = [
    dict(zip(("fused", "later", "overlap", "average"), each, strict=True)) for each in product((False, True), repeat=4)
]


def main_grads(case: Case, fused: bool, later: bool, overlap: bool, average: bool) -> list[dict[str, Any]]:
    """Of each step on this rank, and what was dispatched."""
    config = config_of(case)
    config.gradient_accumulation_fusion, config.delay_wgrad_compute = fused, later
    layer = layer_of(case, config)
    kept = watch(layer)
    options = {"overlap_grad_reduce": overlap, "average_in_collective": average, "bucket_size": 2000}
    options["grad_reduce_in_fp32"] = case.dtype != torch.float32
    ddp = megatron.core.distributed
    model = ddp.DistributedDataParallel(config, ddp.DistributedDataParallelConfig(**options), layer)
    found = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        for micro in range(case.steps):
            given = input_of(case, dist.get_rank(), micro)
            with model.no_sync() if micro + 1 < case.steps else nullcontext():
                y, _ = model(given.x_SBH.requires_grad_())
                y.backward(given.dy_SBH)
                if later:
                    layer.experts.backward_dw()
        model.finish_grad_sync()
        assert all(param.grad is None for param in model.parameters())
        found.append(
            {
                "router": layer.router.weight.main_grad.clone(),
                "up": [main.clone() for main in parameters_of(layer, "linear_fc1", "main_grad")],
                "down": [main.clone() for main in parameters_of(layer, "linear_fc2", "main_grad")],
                "kept": list(kept),
                "experts": layer.local_expert_indices,
                "etp": (layer.token_dispatcher.tp_rank, layer.token_dispatcher.tp_size),
            }
        )
        kept.clear()
    return found


def all_options(case: Case) -> list[list[dict[str, Any]]]:
    return [main_grads(case, **options) for options in OPTIONS]


def check(case: Case, world: int) -> None:
    answers = megatron_ranks(all_options, world, case, **case.sizes)
    kept = [answer[0][0]["kept"] for answer in answers]
    true = truth(case, kept)
    mean = {name: sum(true[name]) / world for name in ("router", "up", "down")}
    for number, options in enumerate(OPTIONS):
        for step in range(STEPS):
            mine = [answer[number][step] for answer in answers]
            assert all(all(map(torch.equal, one["kept"], ids)) for one, ids in zip(mine, kept, strict=True))
            for one in mine:
                experts = slice(one["experts"][0], one["experts"][-1] + 1)
                down = mean["down"][experts].chunk(one["etp"][1], 2)[one["etp"][0]]
                wanted = {"up": share(mean["up"][experts], one["etp"]), "down": down, "router": mean["router"]}
                for name, true_one in wanted.items():
                    got = one[name] if isinstance(one[name], Tensor) else torch.stack(list(one[name]))
                    off = (got.double() - true_one).abs().max() / true_one.abs().max()
                    assert off <= case.bound, (options, step, name, float(off))


@pytest.mark.parametrize("kind", ["pair", "linears"])
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"ep": 2}),
        *(pytest.param(4, s, marks=pytest.mark.megatron_full) for s in ({"ep": 2}, {"ep": 2, "etp": 2}, {"etp": 2})),
    ],
)
def test_main_grad(kind: str, world: int, sizes: dict[str, int]) -> None:
    case = of_kind(CASE, kind)
    check(Case(**{**vars(case), "sizes": sizes}), world)


@pytest.mark.megatron_full
@pytest.mark.parametrize("kind", ["pair", "linears"])
def test_main_grad_is_float32_beside_bfloat16(kind: str) -> None:
    case = of_kind(CASE, kind)
    check(Case(**{**vars(case), "sizes": {"ep": 2}, "dtype": torch.bfloat16, "bound": 2e-2}), 2)
