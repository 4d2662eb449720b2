"""Replicated experts: what is refused, and what hooks see of parameters that others compute with."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trimtab
from helpers.comparing import assert_close
from helpers.layer_case import D, slope
from helpers.ranks import run_ranks
from trimtab.errors import ConfigError, DesyncError
from trimtab.experts.recipes import FP8Blockwise
from trimtab.moe import MoE, MoEConfig
from trimtab.routing.config import RouterConfig

E, F, K = 8, 12, 3


def build(layer: str, **more: Any) -> MoE:
    """The same values on every rank."""
    torch.manual_seed(4)
    config = {"dim": D, "hidden": F, "router": RouterConfig(num_experts=E, top_k=K), "dtype": torch.float64}
    return MoEConfig(**config | {"bias": True} | more).build(layer)  # type: ignore[arg-type]


def rows() -> torch.Tensor:
    return torch.randn(11, D, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicate_experts": "on"}, "replicate_experts='on' is neither 'off', 'auto' nor a tolerance"),
        ({"replicate_experts": True}, "tolerance=True"), ({"replicate_experts": -0.1}, "tolerance=-0.1"),
        ({"replicate_experts": float("nan")}, "tolerance=nan"), ({"replicate_experts": 2000}, "from 0 to 1024"),
        ({"replicate_experts": "auto", "copy_cost": -1}, "copy_cost=-1"), ({"copy_cost": 0.5}, "copy_cost=0.5"),
        ({"replicate_experts": 0.0, "copy_cost": 2**33}, "at most 2"),
    ],
)  # fmt: skip
def test_words_and_numbers_that_are_none(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trimtab.ExpertParallel(**options)


def test_experts_that_keep_something_between_calls() -> None:
    for name, more in {
        "delay_wgrad": {"delay_wgrad": True},
        "a recipe": {"recipe": FP8Blockwise(backend="emulated")},
    }.items():
        moe, mesh = build("moe", dtype=torch.float32, **more), cast(DeviceMesh, None)  # which is not asked
        with pytest.raises(ConfigError, match=f"experts with {name} are not replicated"):
            trimtab.ExpertParallel(replicate_experts="auto").check(moe, mesh)
        with pytest.raises(ConfigError, match=f"experts with {name} are not replicated"):
            moe.experts(torch.ones(1, D), torch.zeros(1, 1).long(), torch.ones(1, 1), replicas=cast(Any, "some"))


def frozen_apart_on_rank() -> str:
    """Rank 1 trains less."""
    moe = build("moe")
    trimtab.parallelize(moe, init_device_mesh("cpu", (2,)), {"": trimtab.ExpertParallel(replicate_experts=0.0)})
    if dist.get_rank():
        moe.experts.down.requires_grad_(False)
    try:
        moe(rows())
    except DesyncError as error:
        return str(error)
    return ""


def test_ranks_that_train_other_weights_raise_on_both() -> None:
    for rank, said in enumerate(run_ranks(frozen_apart_on_rank, 2)):
        assert f"rank(s) {1 - rank} hold other experts than rank {rank}" in said
        trained = " trained" if "than rank 0" in said else ""
        down = rf"has \(gate_up torch.float64 [^a-z]* trained, down torch.float64 \[{E}, {D}, {F}\]{trained},"
        assert re.search(down, said), said


def seen_on_rank(mode: str) -> None:
    """What a hook sees that fires when a parameter's gradient is there, as optimizers and DDP hang on."""
    found: list[list[tuple[str, torch.Tensor]]] = []
    for options in ({}, {"replicate_experts": 0.0, "copy_cost": 0}):
        moe, seen = build("moe", main_grad=mode), []  # type: ignore[var-annotated]
        names, keys = [name for name, _ in moe.named_parameters()], list(moe.state_dict())
        trimtab.parallelize(moe, init_device_mesh("cpu", (2,)), {"": trimtab.ExpertParallel(**options)})  # type: ignore[arg-type]

        def see(param: Any, name: str, seen: list[tuple[str, torch.Tensor]]) -> None:
            fused = getattr(param, "grad_added_to_main_grad", False)
            seen.append((name, (param.main_grad if fused else param.grad).to_local().clone()))

        for name, param in moe.experts.named_parameters():
            if mode != "off":
                param.main_grad = torch.ones_like(param, dtype=torch.float64)  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(partial(see, name=name, seen=seen))
        y = moe(rows(), ids=torch.arange(11 * K).view(11, K) % (E // 2)).y  # all on rank 0
        assert (names, keys) == ([name for name, _ in moe.named_parameters()], list(moe.state_dict()))
        (y * slope(y)).sum().backward()
        found.append(sorted(seen, key=lambda pair: pair[0]))
    assert moe.dispatcher.replicated is not None
    assert moe.dispatcher.replicated.replicas_P.sum() > 0
    plain, replicated = found
    assert [name for name, _ in replicated] == ["down", "down_bias", "gate_up", "gate_up_bias"]
    for (name, wanted), (_, grad) in zip(plain, replicated, strict=True):
        assert_close(grad, wanted, 1e-12, name)


@pytest.mark.parametrize("mode", ["off", "accumulate"])
def test_hooks_see_each_parameter_once_and_whole(mode: str) -> None:
    run_ranks(seen_on_rank, 2, mode)
