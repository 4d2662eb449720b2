"""`from_pretrained` onto expert-parallel ranks trains like one process over every rank's own data.

Outputs, loss and every parameter's gradient, on real ranks over Gloo, against transformers' own loop over the experts
in one process. Float64 is the judge, since there every difference is a mistake; float32 shows what users get.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.ep_case import PATTERNS, Case, Mesh
from helpers.ep_ranks import REPLICATED, run_broken, run_cases, run_loading, run_shared
from helpers.ep_verify import both_precisions, verify
from helpers.families import REFUSED_WHEN_SHARDED, ep_capable, family_names
from helpers.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

TWO = Mesh(ep=2, fsdp=2)
FOUR = (Mesh(ep=4, fsdp=4), Mesh(ep=2, fsdp=4), Mesh(ep=4, fsdp=2, tp=2), Mesh(ep=2, fsdp=2, replicate=2))
PRESETS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")
NO_TENSOR_PARALLEL = {"muse_spark"}
"""Their tensor-parallel plans fail in transformers with any experts."""
VARIANTS = ("muse_spark", "nemotron_h", "aria")
GROUPS = 4
LAYOUTS = ("gpt_oss", "muse_spark", "nemotron_h", "aria", "openai_privacy_filter")
"""Transposed with biases and interleaved, a norm behind the experts, no gate, transposed, a gate of its own."""

ranks4 = pytest.mark.xdist_group("ranks4")


def replicated(case: Case) -> Case:
    """With replicas of hot experts on ranks that have room."""
    return replace(case, experts=REPLICATED, exchange=REPLICATED)


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_family(group: int, tmp_path: Path) -> None:
    names = [name for name in family_names() if ep_capable(name)][group::GROUPS]
    cases = [Case(family=name, mesh=TWO, patterns=("natural",)) for name in names]
    verify([c for case in cases for c in both_precisions(case)], tmp_path)


def test_what_transformers_cannot_load_onto_several_ranks_is_not_left_out_for_longer(tmp_path: Path) -> None:
    names = sorted(REFUSED_WHEN_SHARDED & set(family_names()))
    cases = [Case(family=name, mesh=TWO, experts="eager", exchange="all_to_all") for name in names]
    for name, *raised in zip(names, *run_ranks(run_loading, 2, cases, str(tmp_path), deadline=120.0), strict=True):
        assert any("automatic conversion of the weights" in words for words in raised), (
            f"{name} can be loaded: {raised}"
        )


@ranks4
@pytest.mark.parametrize("mesh", FOUR, ids=str)
def test_however_the_tokens_fall(mesh: Mesh, tmp_path: Path) -> None:
    names = [n for n in (*PRESETS, *VARIANTS) if mesh.tp == 1 or n not in NO_TENSOR_PARALLEL]
    patterns = PATTERNS if mesh == FOUR[0] else ("uneven", "cold", "hot")
    cases = [Case(family=name, mesh=mesh, dtype=torch.float64, patterns=patterns) for name in names]
    if mesh == FOUR[0]:
        in_float32 = ("natural", "hot")  # every pattern is judged in float64
        cases += [replace(c, dtype=torch.float32, patterns=in_float32) for c in cases if c.family in PRESETS]
    unequal = [replace(c, patterns=("cold", "hot")) for c in cases if c.family in ("qwen3_moe", "gpt_oss")]
    verify([*cases, *(replicated(c) for c in unequal if c.dtype == torch.float64)], tmp_path)


@pytest.mark.parametrize(
    ("exchange", "experts"), [("trimtab", "grouped_mm"), ("trimtab", "eager"), ("all_to_all", "trimtab")]
)
def test_either_half_with_a_stock_one(exchange: str, experts: str, tmp_path: Path) -> None:
    dtype = torch.float32 if experts == "grouped_mm" else torch.float64  # which has no float64
    cold_first = ("cold", "natural", "uneven", "hot")  # nothing is set up by an earlier pass where rows came
    cases = [
        Case(family=name, mesh=TWO, exchange=exchange, experts=experts, dtype=dtype, patterns=cold_first)
        for name in ("qwen3_moe", "gpt_oss", "muse_spark", "nemotron_h", "openai_privacy_filter")
    ]
    verify(cases, tmp_path)


@ranks4
def test_a_stock_loop_on_a_cold_rank_whose_experts_are_sharded(tmp_path: Path) -> None:
    """Ranks with the same experts reduce their gradients together: the cold one must bring its zeros."""
    mesh = Mesh(ep=2, fsdp=4)
    verify([Case(family="qwen3_moe", mesh=mesh, experts="eager", dtype=torch.float64, patterns=("cold",))], tmp_path)


@pytest.mark.parametrize("mesh", [TWO, pytest.param(FOUR[0], marks=ranks4)], ids=str)
def test_ordered_sums(mesh: Mesh, tmp_path: Path) -> None:
    name = "trimtab_ordered"
    case = Case(family="qwen3_moe", mesh=mesh, experts=name, exchange=name)
    verify(both_precisions(case), tmp_path)


def test_shared_memory_and_replicated_experts_of_every_layout(tmp_path: Path) -> None:
    name = "trimtab_shared"
    case = Case(family="qwen3_moe", mesh=TWO, experts=name, exchange=name, dtype=torch.float64, patterns=PATTERNS)
    verify([case, *(replicated(replace(case, family=name)) for name in LAYOUTS)], tmp_path)


def test_the_experts_modules_of_a_model_share_one_transport(tmp_path: Path) -> None:
    run_ranks(run_shared, 2, Case(family="qwen3_moe", mesh=TWO), str(tmp_path), deadline=120.0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_ways_to_train(family: str, tmp_path: Path) -> None:
    """Gradient accumulation, frozen parts and recomputation, with a cold rank and with unlike batches."""
    case = Case(family=family, mesh=TWO, dtype=torch.float64, patterns=("uneven", "cold"))
    router = "router" if family == "gpt_oss" else "gate.weight"
    ways: list[dict[str, Any]] = [
        {"steps": 2},
        {"steps": 2, "unsynced": True},
        {"frozen": router},
        {"frozen": "experts"},
        {"frozen": "embed_tokens"},
        {"recompute": "reentrant"},
        {"recompute": "not reentrant"},
        {"recompute": "not reentrant", "steps": 2},
    ]
    cases = [replace(case, **way) for way in ways]
    verify([*cases, *(replicated(one) for one in cases if one.frozen != "embed_tokens")], tmp_path)


@ranks4
def test_ordered_bits_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """With enough rows for every expert: a GEMM's own bits depend on their number where it is small (gemv for one)."""
    name = "trimtab_ordered"
    alone = Case(family="qwen3_moe", mesh=Mesh(ep=1, fsdp=1), experts=name, exchange=name, patterns=("crowded",))
    outputs = []
    for ranks in (1, 2, 4):
        case = replace(alone, mesh=Mesh(ep=ranks, fsdp=ranks))
        first = run_ranks(run_cases, ranks, [case], str(tmp_path), deadline=60.0)[0][0]
        outputs.append(first.outcomes["crowded"].values["output"])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_what_one_rank_does_wrong_every_rank_refuses(tmp_path: Path) -> None:
    slot = "rank 1: 1 slot"
    wrong = {
        "id too large": ("InputError", slot), "id negative": ("InputError", slot),
        "weight not a number": ("InputError", slot), "another top-k": ("DesyncError", "top-1, "),
    }  # fmt: skip
    stock = {"all eager": ("", ""), "one eager": ("", "")}
    of_replicated = {
        "all eager": ("ConfigError", "'eager' runs no replicas: with replicate_experts= choose"),
        "one eager": ("DesyncError", "hold other experts"),
    }
    case = Case(family="qwen3_moe", mesh=TWO)
    expected = [*(wrong | stock).values(), *(wrong | of_replicated).values()]
    for refusals in run_ranks(
        run_broken, 2, [case, replicated(case)], tuple(wrong | stock), str(tmp_path), deadline=60.0
    ):
        for (kind, says), refusal in zip(expected, refusals, strict=True):
            assert refusal.kind == kind, refusal
            assert says in refusal.message, refusal
            assert refusal.seconds < 10.0, refusal
