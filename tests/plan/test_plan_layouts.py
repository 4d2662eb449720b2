"""Layouts of a run: which ones divide, which are refused and how, what is said of those that do not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.dispatch.planned import Call
from trimtab.errors import ConfigError
from trimtab.plan.device import DEVICES
from trimtab.plan.layouts import Layout, meshes, plan_layout
from trimtab.plan.ledger import CATEGORIES
from trimtab.plan.stages import Points, Stages
from trimtab.plan.traffic import Traffic
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import inspect
from trimtab.train.presets import preset_config


def tiny(**options: Any) -> TrainConfig:
    return TrainConfig(**{"model": "qwen3_moe", "batch_size": 2, "seq_len": 16} | options).resolved()


def test_all_meshes_that_divide_and_no_other() -> None:
    found = [(m.replicate, m.fsdp, m.tp, m.ep, c.gradient_checkpointing) for c, m in meshes(tiny(), 4, 16)]
    expected = {
        (replicate, 4 // replicate // tp, tp, ep, again)
        for replicate in (1, 2, 4) for tp in (1, 2, 4) if 4 % (replicate * tp) == 0
        for ep in (1, 2, 4) if (4 // replicate) % ep == 0 and (ep == 1 or ep % tp == 0)
        for again in (False, True)
    }  # fmt: skip
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert found[0] == (1, 4, 1, 4, False)
    fixed = list(meshes(tiny(ep=2, gradient_checkpointing=True), 4, 16))
    assert {(m.ep, c.gradient_checkpointing) for c, m in fixed} == {(2, True)}


def layout_of(parts: dict[str, float], *, room: float, **options: Any) -> Layout:
    """A layout whose head holds these GB."""
    config = tiny(**options)
    mesh = Mesh.of(config, world=8, num_experts=16)
    held = torch.tensor([[int(parts.get(name, 0) * 1e9) for name in CATEGORIES]])
    points = {"backward of the head": Points([""], held)}
    stages = Stages(points, flops=10**12, moved={"alltoall_base_ of 8": 8 * 10**9})  # type: ignore[arg-type]
    device = replace(DEVICES["cpu"], bytes=room * 1e9)
    return Layout(config=config, mesh=mesh, device=device, skew="even", experts=16, stages=stages)


@pytest.mark.parametrize(
    ("parts", "options", "said"),
    [
        ({"weights": 5, "activations": 9}, {}, "activations 9 in the backward of the head; --gradient-checkpointing"),
        ({"weights": 5, "activations": 4, "exchange": 4}, {}, "activations 4 in the backward of the head; --gradient-"),
        ({"weights": 5, "gathered": 8}, {"ep": 1, "gradient_checkpointing": True}, "gathered 8 in the .*; --ep 2"),
        ({"gathered": 9}, {"tp": 2, "ep": 2, "gradient_checkpointing": True}, "gathered 9 in the .*; --ep 4"),
        ({"weights": 5, "exchange": 8}, {"gradient_checkpointing": True}, "exchange 8 in .*; --replicate-experts 0.1"),
        ({"weights": 5, "other": 8}, {"gradient_checkpointing": True}, "other 8 in .*; --batch-size 1"),
        ({"weights": 5, "other": 8}, {"batch_size": 1, "gradient_checkpointing": True}, "; a shorter --seq-len"),
        ({"weights": 5, "moments": 10}, {}, "moments 10 in .*; more ranks, or --lora 16"),
        ({"weights": 15}, {"lora": 4}, "weights 15 in .*; more ranks, or --quantize nf4"),
        ({"weights": 15}, {"lora": 4, "quantize": "packed"}, "weights 15 in .*; more ranks, or --quantize nf4"),
        ({"weights": 15}, {"replicate": 2}, "weights 15 in .*; --replicate 1"),
    ],
)
def test_what_does_not_fit_says_what_would_help(parts: dict[str, float], options: dict[str, Any], said: str) -> None:
    layout = layout_of(parts, room=8, **options)
    assert layout.left < 0
    assert layout.words.startswith("no, ")
    assert re.search(said, layout.words), layout.words
    assert layout.as_json()["refused"] == layout.words


def test_the_time_is_a_bound() -> None:
    layout = layout_of({"weights": 1}, room=8)
    assert layout.words == "yes, 7 left"
    assert layout.seconds == pytest.approx(7e9 / 450e9)  # seven eighths leave this rank
    assert replace(layout, device=replace(DEVICES["cpu"], flops=1e12)).seconds == 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicate_experts": "0.1", "ep": 1}, "--replicate-experts 0.1: every rank has all experts (ep 1)"),
        ({"tp": 3}, "--tp 3 does not divide Qwen3MoeForCausalLM's 4 heads (num_attention_heads)"),
        ({"kernels": "cpu"}, "kernels 'cpu' run on cpu devices only, not on cuda"),
        ({"kernels": "triton"}, "kernels 'triton' cannot be planned: plan with 'grouped_mm+triton'"),
    ],
)
def test_a_layout_that_the_run_refuses_is_refused_in_its_words(options: dict[str, Any], said: str) -> None:
    config = tiny(**options)
    mesh = Mesh.of(config, world=6, num_experts=16)
    layout = plan_layout(config, mesh, DEVICES["cuda"], skeleton=inspect(config.model))
    assert layout.words.startswith(f"refused: {said}")
    assert layout.left < 0
    assert json.loads(json.dumps(layout.as_json()))["refused"] == layout.refused


def test_codes_that_are_kept_are_counted_as_codes(tmp_path: Path) -> None:
    config = preset_config("gpt_oss")
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path)
    weights = {}
    for quantize in (None, "keep"):
        asked = tiny(model=str(tmp_path), quantize=quantize, lora=2, lora_targets="experts", dtype="bfloat16")
        mesh = Mesh.of(asked, world=1)
        layout = plan_layout(asked, mesh, DEVICES["cuda"], skeleton=inspect(asked.model))
        weights[quantize] = layout.peak[2]["weights"]
    assert weights["keep"] < 0.7 * weights[None]


def test_skew_of_a_run_is_its_worst_layer_and_step(tmp_path: Path) -> None:
    def line(*loads: list[int]) -> str:
        return json.dumps({"step": 1, "layers": {f"l{i}": {"tokens_per_expert": load} for i, load in enumerate(loads)}})

    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join([line([2, 2, 2, 2], [4, 4, 0, 0]), line([8, 0, 0, 8], [1, 1, 1, 1])]) + "\n")
    _, received = Traffic(skew=str(metrics))(Call(tokens=100, top_k=2, experts=4, rank=1, ranks=2))
    assert sum(received.slots) == 400
    assert sum(received.rows) == 200
    uneven = tmp_path / "loads.jsonl"
    uneven.write_text(line([30, 20, 30, 20]) + "\n")
    _, received = Traffic(skew=str(uneven), rank=0)(Call(tokens=1000, top_k=1, experts=4, rank=0, ranks=4))
    assert sum(received.slots) == pytest.approx(1200, rel=0.05)  # 30 % of all slots
    with pytest.raises(ConfigError, match="no layer there has 8 experts"):
        Traffic(skew=str(uneven))(Call(tokens=10, top_k=1, experts=8, rank=0, ranks=4))


@pytest.mark.parametrize("content", [None, "", "{}\n", "no json\n", '{"layers": 3}\n'])
def test_a_skew_that_is_none_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"--skew .*loads\.jsonl: "):
        Traffic(skew=str(path))
