"""Codes beside other programs and other quantizers: nobody takes them for weights, nothing is quantized by half."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from helpers.coded_checkpoints import loss_and_gradients, save_official, tiny
from trimtab.errors import ConfigError
from trimtab.integrations.transformers import QuantizedExpertsConfig, dequantize_experts, lora_config, quantize_experts

pytestmark = pytest.mark.usefixtures("registered", "one_thread")
read = transformers.AutoModelForCausalLM.from_pretrained
OURS: dict[str, Any] = {"experts_implementation": "trimtab", "dtype": torch.bfloat16}


def kept_fp8(folder: Path) -> Any:
    return read(save_official(folder / "fp8", "fp8"), **OURS)


def half(folder: Path) -> Any:
    """The second layer keeps its weights."""
    tiny("qwen3_moe").save_pretrained(folder / "half")
    config = QuantizedExpertsConfig("int8", modules_to_not_convert=["layers.1.mlp.experts"])
    return read(folder / "half", quantization_config=config, **OURS)


SAVED = {
    "stacked": lambda folder: quantize_experts(tiny("qwen3_moe"), "int8"),
    "by blocks": lambda folder: quantize_experts(tiny("mixtral"), "nf4"),
    "transposed": lambda folder: quantize_experts(tiny("gpt_oss"), "int8"),
    "without a gate": lambda folder: quantize_experts(tiny("nemotron_h", layers_block_type=["moe"] * 2), "int8"),
    "kept": kept_fp8,
    "half": half,
}


@pytest.mark.parametrize("kind", SAVED)
def test_a_program_that_does_not_know_codes_misses_the_weights(kind: str, tmp_path: Path) -> None:
    model = SAVED[kind](tmp_path)
    model.save_pretrained(tmp_path / "codes")
    held = {name for name, p in model.named_parameters() if p.dtype is torch.uint8 and not name.endswith("_scales")}
    assert held
    files = load_file(tmp_path / "codes" / "model.safetensors")
    assert len([name for name in files if name.endswith("_codes")]) == len(held)
    assert all(name.endswith(("_codes", "_scales")) for name, t in files.items() if t.dtype is torch.uint8)
    same = read(tmp_path / "codes", **OURS | {"dtype": model.dtype}).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items())
    says = json.loads((tmp_path / "codes" / "config.json").read_text())
    del says["quantization_config"]
    (tmp_path / "codes" / "config.json").write_text(json.dumps(says))
    _, report = read(tmp_path / "codes", output_loading_info=True)
    assert held <= report["missing_keys"]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_that_another_implementation_runs_are_not_quantized(implementation: str) -> None:
    model = tiny("qwen3_moe", experts_implementation=implementation)
    before = loss_and_gradients(model)[0]
    with pytest.raises(ConfigError, match=r"model\.set_experts_implementation\('trimtab'\) before \(nf4\)"):
        quantize_experts(model)
    assert torch.equal(loss_and_gradients(model)[0], before)
    model.set_experts_implementation("trimtab")
    assert loss_and_gradients(quantize_experts(model))[0].isfinite()


@pytest.mark.parametrize("method", ["torchao", "gptq", "fp8"])
def test_a_model_that_is_quantized_otherwise_is_left_whole(method: str) -> None:
    model = tiny("qwen3_moe")
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method))
    with pytest.raises(ConfigError, match=f"quantized by {method}: experts as codes go beside bitsandbytes"):
        quantize_experts(model)
    assert all(parameter.is_floating_point() for parameter in model.parameters())
    with pytest.raises(ConfigError, match=f"quantized by {method}"):
        QuantizedExpertsConfig(rest={"quant_method": method})


def bits(number: int) -> Any:
    if number == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def loss(model: Any) -> float:
    """As it trains: on a CPU bitsandbytes packs 4-bit weights anew, and rounds, where it evaluates."""
    with torch.no_grad():
        return float(loss_of(model.train()))


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) * 7 % 64
    found: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return found


@pytest.mark.parametrize("number", [4, 8])
def test_linear_layers_by_bitsandbytes_and_experts_by_trimtab(number: int, tmp_path: Path) -> None:
    """Quantized, saved, read; trained, saved, read; merged where everything is plain again."""
    peft, bnb = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear4bit if number == 4 else bnb.nn.Linear8bitLt
    base, saved, adapter = tmp_path / "base", tmp_path / "saved", tmp_path / "adapter"
    tiny("qwen3_moe", 128).to(torch.bfloat16).save_pretrained(base)
    model = read(base, quantization_config=QuantizedExpertsConfig("nf4", rest=bits(number)), **OURS)
    in_two_steps = quantize_experts(read(base, quantization_config=bits(number), **OURS))
    before = loss(model)
    assert loss(in_two_steps) == before
    in_two_steps.save_pretrained(saved)
    for _ in range(2):  # what was read is saved as well
        again = read(saved, **OURS)
        assert type(again.model.layers[0].self_attn.q_proj) is linear
        assert loss(again) == before
        saved = tmp_path / "again"
        again.save_pretrained(saved)
    trained = peft.get_peft_model(model, lora_config(model, rank=4, targets=("experts", "attention")))
    assert any("q_proj" in name for name, p in trained.named_parameters() if p.requires_grad)
    optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(8):
        loss_of(trained).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = loss(trained)
    assert after < 0.8 * before
    trained.save_pretrained(adapter)
    assert loss(peft.PeftModel.from_pretrained(again, adapter)) == pytest.approx(after, rel=1e-4)
    plain = read(saved, **OURS)
    assert loss(dequantize_experts(plain)) == pytest.approx(before, rel=1e-2)
    assert type(plain.model.layers[0].self_attn.q_proj) is linear
    assert plain.config.quantization_config.quant_method == "bitsandbytes"
    plain = read(saved, **OURS).dequantize()
    merged = peft.PeftModel.from_pretrained(plain, adapter).merge_and_unload()
    assert loss(merged) == pytest.approx(after, rel=5e-2)
    merged.save_pretrained(tmp_path / "merged")
    alone, report = read(tmp_path / "merged", dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    assert loss(alone) == pytest.approx(after, rel=5e-2)
