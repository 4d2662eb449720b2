"""Codes that are made while a checkpoint is read, saved, read again, merged into: bits where due, else a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.coded_checkpoints import loss_and_gradients, tiny
from helpers.families import build_model, model_class, save_model
from helpers.peft_case import fill, lora
from trimtab.errors import ConfigError
from trimtab.experts.module import ExpertMLP
from trimtab.integrations.transformers import (
    QuantizedExpertsConfig,
    dequantize_experts,
    quantize_experts,
)

pytestmark = pytest.mark.usefixtures("registered", "one_thread")
KINDS = ("qwen3_moe", "gpt_oss", "nemotron_h", "qwen3_vl_moe", "ernie4_5_vl_moe", "aria")
"""Read in turn as merged experts, stacked and transposed, without a gate, turned, two stacks of a list, transposed."""


def same(some: Any, other: Any) -> None:
    a, b = some.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[key]) and value.dtype is b[key].dtype for key, value in a.items())


@pytest.mark.parametrize("family", KINDS)
def test_read_saved_and_read_again(family: str, tmp_path: Path) -> None:
    """What is read is what `quantize_experts` makes of the model; its files hold the bits."""
    save_model(family, tmp_path / "plain", 0)
    options = {"experts_implementation": "trimtab", "dtype": "float32"}
    read = model_class(family).from_pretrained(
        tmp_path / "plain", quantization_config=QuantizedExpertsConfig("int8"), **options
    )
    same(read, quantize_experts(model_class(family).from_pretrained(tmp_path / "plain", **options), "int8"))
    read.save_pretrained(tmp_path / "codes")
    assert json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]["format"] == "int8"
    same(model_class(family).from_pretrained(tmp_path / "codes", **options), read)


def test_quantized_in_place_saved_and_read_again(tmp_path: Path) -> None:
    model = quantize_experts(tiny("qwen3_moe"), "nf4")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="trimtab")
    same(again, model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(loss_and_gradients(again)[0], loss_and_gradients(model)[0])
    with pytest.raises(ConfigError, match="are codes already"):
        quantize_experts(again)
    with pytest.raises(ConfigError, match="pass experts_implementation='trimtab'"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merging_is_refused_until_the_weights_are_back(family: str) -> None:
    peft = pytest.importorskip("peft")
    base = quantize_experts(tiny(family), "int8")
    model = peft.get_peft_model(base, lora(base, target_modules=["q_proj"]))
    fill(model)
    plain = peft.get_peft_model(
        dequantize_experts(quantize_experts(tiny(family), "int8")), model.peft_config["default"]
    )
    fill(plain)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ConfigError, match=r"take no adapter in.*dequantize_experts\(model\)"):
            merge()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "nothing was merged"
    same(dequantize_experts(model).merge_and_unload(), plain.merge_and_unload())


def test_codes_are_not_drawn() -> None:
    experts = ExpertMLP(2, 64, 64).quantize_("nf4")
    with pytest.raises(ConfigError, match="codes are not drawn"):
        experts.reset_parameters()


def test_refused(tmp_path: Path) -> None:
    model = build_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ConfigError, match=r"nf4 has blocks of 64 inputs, and Qwen3MoeExperts\.gate_up_proj has 32"):
        read(tmp_path, experts_implementation="trimtab", quantization_config=QuantizedExpertsConfig("nf4"))
    half = quantize_experts(tiny("qwen3_moe"), "int8")
    for parameter in half.parameters():
        parameter.data = parameter.data.to(torch.bfloat16) if parameter.is_floating_point() else parameter.data
    with pytest.raises(ConfigError, match=r"scales of int8 came in torch.bfloat16"):
        loss_and_gradients(half)
