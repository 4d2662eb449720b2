"""Replicated experts: what is refused, and what hooks see of parameters that others compute with."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trimtab
from helpers.comparing import assert_close
from helpers.layer_case import slope
from helpers.ranks import run_ranks, unpacked
from helpers.replicated_ranks import D, E, F, K, build, given, solve
from trimtab.errors import ConfigError, DesyncError
from trimtab.experts.recipes import FP8Blockwise


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicate_experts": "on"}, "replicate_experts='on' is neither 'off', 'auto' nor a tolerance"),
        ({"replicate_experts": True}, "tolerance=True"), ({"replicate_experts": -0.1}, "tolerance=-0.1"),
        ({"replicate_experts": "auto", "copy_cost": -1}, "copy_cost=-1"), ({"copy_cost": 0.5}, "copy_cost=0.5"),
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
        moe(given("random", dist.get_rank(), 2)[0])
    except DesyncError as error:
        return str(error)
    return ""


def test_ranks_that_train_other_weights_raise_on_both() -> None:
    for rank, said in enumerate(run_ranks(frozen_apart_on_rank, 2)):
        assert f"rank(s) {1 - rank} are in another call than rank {rank}" in said
        of_others = " trained" if "Rank 0 also has" in said else ""  # a rank may be told what the other has found
        down = rf"copied: gate_up torch.float64 [^a-z]* trained, down torch.float64 \[{E}, {D}, {F}\]{of_others},"
        assert re.search(down, said), said


def seen_on_rank(mode: str) -> list[tuple[str, torch.Tensor]]:
    """What a hook sees that fires when a parameter's gradient is there, as optimizers and DDP hang on."""
    moe, seen = build("moe", main_grad=mode), []
    names = [name for name, _ in moe.named_parameters()]
    keys = list(moe.state_dict())
    trimtab.parallelize(
        moe, init_device_mesh("cpu", (2,)), {"": trimtab.ExpertParallel(replicate_experts=0.0, copy_cost=0)}
    )

    def hook(name: str) -> Any:
        def see(param: Any) -> None:
            fused = getattr(param, "grad_added_to_main_grad", False)
            grad = param.main_grad if fused else param.grad
            seen.append((name, grad.to_local().clone()))

        return see

    for name, param in moe.experts.named_parameters():
        if mode != "off":
            param.main_grad = torch.ones_like(param, dtype=torch.float64)
        param.register_post_accumulate_grad_hook(hook(name))
    x, ids, mask = given("one_rank", dist.get_rank(), 2)
    y = moe(x, ids=ids, token_mask=mask).y
    assert names == [name for name, _ in moe.named_parameters()]
    assert keys == list(moe.state_dict())
    (y * slope(y)).sum().backward()
    assert moe.dispatcher.replicated.replicas_P.sum() > 0
    return seen


@pytest.mark.parametrize("mode", ["off", "accumulate"])
def test_hooks_see_each_parameter_once_and_whole(mode: str) -> None:
    true = unpacked(solve(["one_rank"], 2))["one_rank"].experts
    for rank, seen in enumerate(run_ranks(seen_on_rank, 2, mode)):
        assert sorted(name for name, _ in seen) == ["down", "down_bias", "gate_up", "gate_up_bias"]
        for name, grad in seen:
            before = 1.0 if mode != "off" and "bias" not in name else 0.0
            wanted = true[f"experts.{name}"][rank * E // 2 : (rank + 1) * E // 2] + before
            assert_close(grad, wanted, 1e-12, name)


def test_a_group_of_one_has_nothing_to_replicate() -> None:
    assert run_ranks(alone_on_rank, 1) == [True]


def alone_on_rank() -> bool:
    moe, same = build("moe"), build("moe")
    trimtab.parallelize(
        moe, init_device_mesh("cpu", (1,)), {"": trimtab.ExpertParallel(replicate_experts=0.0, copy_cost=0)}
    )
    x = torch.randn(5, D, dtype=torch.float64)
    assert (moe.dispatcher.replication, moe.dispatcher.replicated) == (None, None)
    assert moe.experts.num_experts == E
    assert moe(x).ids_TK.shape == (5, K)
    assert moe.experts.down.shape[-1] == F
    return torch.equal(moe(x).y, same(x).y)
