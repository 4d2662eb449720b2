"""peft's adapters on experts that are spread over ranks, against one process with peft over transformers' own loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.ep_case import Case, Mesh
from helpers.ep_ranks import REPLICATED
from helpers.ep_verify import verify
from helpers.families import build_model
from helpers.peft_ranks import adapters_of, merge_several, run_trainer, train_in_trainer, train_save_and_resume
from helpers.ranks import run_ranks
from trimtab.routing.loads import load_scalars

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

TWO = Mesh(ep=2, fsdp=2)
KINDS = ("qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark", "aria", "granitemoe", "ernie4_5_vl_moe")
"""A family of each kind: plain, transposed with biases, without a gate, a norm behind, a gate of its own, …"""


BALANCE: dict[str, Any] = {"experts": REPLICATED, "exchange": REPLICATED}


def case(family: str, mesh: Mesh = TWO, lora: str = "experts", **options: object) -> Case:
    given = {"patterns": ("uneven", "cold"), "dtype": torch.float64} | options
    return Case(family=family, mesh=mesh, lora=lora, **given)  # type: ignore[arg-type]


def test_two_ranks_in_both_precisions(tmp_path: Path) -> None:
    cases = [case(family, patterns=("natural", "cold")) for family in KINDS]
    cases += [case(family, patterns=("cold",), **BALANCE) for family in KINDS]
    verify([*cases, case("qwen3_moe", dtype=torch.float32), case("gpt_oss", dtype=torch.float32)], tmp_path)


def test_attention_beside_experts_over_steps_and_recomputed(tmp_path: Path) -> None:
    """Attention's adapters are peft's, and `average_replicated` takes the mean that FSDP takes of what it shards."""
    ways: list[dict[str, Any]] = [{"steps": 2}, {"recompute": "reentrant"}, {"recompute": "not reentrant", "steps": 2}]
    ways += [BALANCE, {"recompute": "not reentrant", "steps": 2, **BALANCE}]
    verify([case("qwen3_moe", lora="attention", **way) for way in ways], tmp_path)


def test_two_ranks_with_the_same_tokens(tmp_path: Path) -> None:
    """ep=1: transformers' rules cut experts over F, of gate and up each (qwen3), transposed (aria), without a gate."""
    experts, cut = Mesh(ep=2, fsdp=1, tp=2), Mesh(ep=1, fsdp=1, tp=2)
    cases = [case("qwen3_moe", experts, "attention"), case("gpt_oss", experts)]
    of_both = [("qwen3_moe", "attention"), ("aria", "experts"), ("nemotron_h", "experts")]
    verify([*cases, *(case(family, cut, lora, patterns=("natural",)) for family, lora in of_both)], tmp_path)


@pytest.mark.xdist_group("ranks4")
def test_four_ranks(tmp_path: Path) -> None:
    meshes = {Mesh(ep=2, fsdp=4): "attention", Mesh(ep=4, fsdp=2, tp=2): "experts"}
    hybrid = {Mesh(ep=2, fsdp=2, replicate=2): "experts", Mesh(ep=1, fsdp=2, tp=2): "experts"}
    cases = [case("qwen3_moe", mesh, lora) for mesh, lora in (meshes | hybrid).items()]
    verify([*cases, *(case("qwen3_moe", mesh, lora, **BALANCE) for mesh, lora in meshes.items())], tmp_path)


def test_a_trainer_that_accumulates_and_clips_does_what_one_process_does(tmp_path: Path) -> None:
    """Four batches a step, two on each rank: transformers' Trainer averages adapters itself, and twice is once."""
    base = build_model("qwen3_moe", dtype=torch.float64)
    base.set_experts_implementation("eager")
    wanted, norms = run_trainer(base, str(tmp_path), 4, average=False)
    assert len(norms) == 2
    assert min(norms) > 0.2, "clipped"
    for ways in run_ranks(train_in_trainer, 2, case("qwen3_moe", lora=""), str(tmp_path)):
        for adapters, found in ways:
            assert found == pytest.approx(norms, rel=1e-10)
            for name, value in wanted.items():
                torch.testing.assert_close(adapters[name], value, rtol=1e-10, atol=1e-12, msg=name)
    lines = [json.loads(line)["layers"] for line in (tmp_path / "loads.jsonl").read_text().splitlines()]
    assert [len(layers) for layers in lines] == [2, 2], "by layer and step"
    for layers in lines:
        for layer in layers.values():
            copied = layer["replicated"]
            assert 1 <= copied["busiest_after"] < 1.05, "a row more than the mean, where that is no whole number"
            assert (copied["replicas"] > 0) == (copied["busiest_before"] > copied["busiest_after"])
        scalars = load_scalars(layers, most_keys=9)
        assert scalars["loads/replicas"] == sum(layer["replicated"]["replicas"] for layer in layers.values()) > 0
        assert (
            scalars["loads/replica_bytes"] == sum(layer["replicated"]["replica_bytes"] for layer in layers.values()) > 0
        )
        assert len(scalars) == 9
        assert "loads/replicas" not in load_scalars(layers, most_keys=8)


def test_the_exchange_of_others_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"adapters of 8 experts, 32 to 32: of sharded experts those run"):
        verify([case("qwen3_moe", exchange="all_to_all")], tmp_path)


def test_adapters_resume_bit_for_bit_and_load_at_another_degree(tmp_path: Path) -> None:
    from peft import PeftModel

    at_two = case("qwen3_moe", lora="")
    ranks = run_ranks(train_save_and_resume, 2, at_two, str(tmp_path))
    base = build_model("qwen3_moe", dtype=torch.float64)
    alone = adapters_of(PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False))
    assert len(alone) == 8
    for first in ranks:
        assert all(torch.equal(first[name], value) for name, value in alone.items()), "alike on every rank, and whole"


@pytest.mark.parametrize("mesh", [TWO, Mesh(ep=1, fsdp=1, tp=2)], ids=str)
def test_one_of_two_adapters_is_merged_into_sharded_experts_and_saved(mesh: Mesh, tmp_path: Path) -> None:
    """Byte for byte what one process merges of the saved adapter."""
    from peft import PeftModel

    ranks = run_ranks(merge_several, 2, case("qwen3_moe", mesh, lora=""), str(tmp_path))
    alone = PeftModel.from_pretrained(
        build_model("qwen3_moe", dtype=torch.float64), tmp_path / "several" / "two", autocast_adapter_dtype=False
    ).merge_and_unload()
    for merged in ranks:
        assert all(torch.equal(merged[name], value) for name, value in alone.named_parameters())
