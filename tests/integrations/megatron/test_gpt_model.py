"""A GPTModel with trimtab's MoE layers trains as with Megatron's: loss and gradient norm of every step, to six digits.
Saved in Megatron's distributed checkpoints with its optimizer it goes on: by the same layers to the bit.

Megatron's DDP, optimizer, clipping and schedules, two micro-batches a step; Megatron's layers are its all-to-all before
SequentialMLP. Both begin with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.megatron_cpu import VERSION, megatron
from helpers.megatron_gpt import Layout, Run, assert_alike, resumed, trained

OURS = ("experts", "each", "exchange", "grouped", "ordered")
OVERLAP = {"overlap_grad_reduce": True, "average_in_collective": True, "bucket_size": 4096}
GATHERED = Run(distributed_optimizer=True, ddp=OVERLAP | {"overlap_param_gather": True})
"""Megatron gathers a module's parameters when it is called."""
FULL = pytest.mark.megatron_full
ranks2, ranks4 = pytest.mark.xdist_group("ranks2"), pytest.mark.xdist_group("ranks4")


def compare(layout: Layout, *runs: Run, beside: Layout | None = None, kinds: Sequence[str] = OURS) -> None:
    """Each of `runs` with each kind of ours, against Megatron's own, at another layout where it cannot run at this."""
    theirs = [replace(run, kind="megatron") for run in runs]
    ours = [replace(run, kind=kind) for run in runs for kind in kinds]
    found = trained(layout, [*theirs, *ours] if beside is None else ours)
    expected = found[: len(runs)] if beside is None else trained(beside, theirs)
    found = found[len(runs) :] if beside is None else found
    for run, steps in zip(ours, found, strict=True):
        assert_alike(steps, expected[ours.index(run) // len(kinds)])
    assert all(len(set(steps)) == run.steps for run, steps in zip(runs, expected, strict=True)), "it trains"


@ranks2
def test_two_expert_parallel_ranks() -> None:
    compare(Layout(2, ep=2), Run())


@ranks2
def test_parameters_are_gathered_before_they_are_read() -> None:
    compare(Layout(2), replace(GATHERED, steps=3), kinds=("experts", "each"))


@FULL
def test_one_rank() -> None:
    compare(Layout(1), Run(), Run(distributed_optimizer=True))


@FULL
@ranks2
def test_distributed_optimizer_and_overlap_on_two_ranks() -> None:
    compare(Layout(2, ep=2), Run(distributed_optimizer=True), Run(ddp=OVERLAP), Run(micro_batches=1))
    compare(Layout(2), Run(), Run(distributed_optimizer=True))


@FULL
@ranks4
@pytest.mark.parametrize("ep", [2, 4])
def test_distributed_optimizer_on_four_ranks(ep: int) -> None:
    compare(Layout(4, ep=ep), Run(distributed_optimizer=True), Run(distributed_optimizer=True, ddp=OVERLAP))


@FULL
@ranks4
def test_expert_tensor_parallel_ranks() -> None:
    """Megatron exchanges between them the same number of rows alone, over Gloo: beside it is cut by EP alone."""
    runs = Run(), Run(distributed_optimizer=True)
    compare(Layout(4, ep=2, etp=2), *runs, beside=Layout(4, ep=2))
    # 0.16 averages gradients of SequentialMLP over ranks that hold other parts of it, where EP is 1 and ETP is not TP
    kinds = [kind for kind in OURS if VERSION > (0, 16) or kind != "exchange"]
    compare(Layout(4, etp=4), *runs, beside=Layout(4), kinds=kinds)


@FULL
@ranks4
@pytest.mark.parametrize("frozen", [(), ("linear_fc1",), ("experts",)])
def test_frozen_experts_with_gathered_parameters_on_four_ranks(frozen: tuple[str, ...]) -> None:
    runs = [replace(run, frozen=frozen, steps=3) for run in (Run(distributed_optimizer=True), GATHERED)]
    compare(Layout(4, ep=2), *runs)


@FULL
@ranks4
def test_pipeline_stages() -> None:
    compare(Layout(2, pp=2), Run())
    compare(Layout(4, pp=2, ep=2), Run(), Run(distributed_optimizer=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "all recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "a block recomputed": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "MoE recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "dense layers": {"moe_layer_freq": [0, 1]},
    "multi-token prediction": {"mtp_num_layers": 1},
    "expert bias": {
        "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none", "moe_router_bias_update_rate": 0.05,
    },
    "groups": {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_score_function": "sigmoid"},
    "loss of sequences, z-loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 1e-2},
    "global loss": {"moe_router_load_balancing_type": "global_aux_loss"},
    "no shared experts": {"moe_shared_expert_intermediate_size": None},
    "capacity": {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "none"},
    "top 1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "squared ReLU": {"gated_linear_unit": False, "activation_func": megatron.core.activations.squared_relu},
    "biases": {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None},
    "per-token loss": {"calculate_per_token_loss": True},
}  # fmt: skip


@FULL
@ranks2
@pytest.mark.parametrize("option", OPTIONS)
def test_option(option: str) -> None:
    compare(Layout(2, ep=2), Run(model=OPTIONS[option], steps=4))


@ranks2
def test_from_megatron_to_trimtab_and_back(tmp_path: Path) -> None:
    kinds = ("megatron", "experts", "exchange", "megatron")
    steps = resumed(Layout(2, ep=2), [Run(kind, steps=2) for kind in kinds], tmp_path)
    (expected,) = trained(Layout(2, ep=2), [Run(steps=8)])
    assert_alike(steps, expected)


@FULL
@ranks2
@pytest.mark.parametrize("kind", ["experts", "exchange", "grouped"])
def test_bit_equal_going_on(kind: str, tmp_path: Path) -> None:
    steps = resumed(Layout(2, ep=2), [Run(kind, steps=3), Run(kind, steps=3)], tmp_path)
    assert [steps] == trained(Layout(2, ep=2), [Run(kind)])
