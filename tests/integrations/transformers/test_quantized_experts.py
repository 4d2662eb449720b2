"""transformers' experts as codes: what the model computes is what it computes with the decoded weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from helpers.coded_checkpoints import loss_and_gradients, same_adapters_on, same_gradients, tiny
from trimtab.checkpoint.state import is_transformers_experts
from trimtab.errors import ConfigError
from trimtab.experts.quantized import decoded
from trimtab.integrations.transformers import QuantizedExpertsConfig, quantize_experts
from trimtab.integrations.transformers.quantized import codes_of


def with_decoded(model: nn.Module) -> nn.Module:
    """The same model with the weights that its codes stand for."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if is_transformers_experts(module):
            for name in ("gate_up_proj", "down_proj"):
                held = codes_of(module, name)
                assert held is not None
                wide = decoded(getattr(module, name), held[1], held[0], held[2])
                delattr(module, name)
                setattr(module, name, nn.Parameter(wide.transpose(1, 2).contiguous() if module.is_transposed else wide))
            for name in ("gate_up_proj_scales", "down_proj_scales", "codes_of_experts"):
                delattr(module, name)
    return model


@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_of_codes_is_that_of_what_they_decode_to(family: str, name: str) -> None:
    model = quantize_experts(tiny(family), name)
    assert sum("experts.gate_up_proj_scales" in key for key in model.state_dict()) == 2
    loss, gradients = loss_and_gradients(with_decoded(model))
    of_others = {k: g for k, g in gradients.items() if not k.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    same_gradients(loss_and_gradients(model), (loss, of_others))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_pefts_adapters_go_on_codes(family: str) -> None:
    model = quantize_experts(tiny(family), "nf4")
    same_adapters_on(model, with_decoded(model))


def test_a_checkpoint_is_quantized_while_it_is_read(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QuantizedExpertsConfig("nf4"), experts_implementation="trimtab", dtype="float32"
    )
    want = quantize_experts(model, "nf4").state_dict()
    got = loaded.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], value) for key, value in want.items())
    assert all(torch.isfinite(g).all() for g in loss_and_gradients(loaded)[1].values())


def test_refused() -> None:
    with pytest.raises(ConfigError, match="no experts modules"):
        quantize_experts(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="not to 'fp8'"):
        QuantizedExpertsConfig("fp8")
