"""transformers' experts as codes: what the model computes is what it computes with the decoded weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.experts.quantized import decoded
from trimtab.integrations.transformers import register
from trimtab.integrations.transformers.codes import codes_of, is_experts
from trimtab.integrations.transformers.quantized import TrimtabExpertsConfig, quantize_experts


def tiny(family: str, **more: object) -> nn.Module:
    register()
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "intermediate_size": 64, "experts_implementation": "trimtab",
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes, **more))


def with_decoded(model: nn.Module) -> nn.Module:
    """The same model with the weights that its codes stand for."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if is_experts(module):
            kinds = codes_of(module, "gate_up_proj")
            assert kinds is not None
            for name, scales in (("gate_up_proj", kinds.up), ("down_proj", kinds.down)):
                wide = decoded(getattr(module, name), scales, kinds.format, kinds.dtype)
                delattr(module, name)
                setattr(module, name, nn.Parameter(wide.transpose(1, 2).contiguous() if module.is_transposed else wide))
            for name in ("gate_up_proj_scales", "down_proj_scales", "codes_of_experts"):
                delattr(module, name)
    return model


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.arange(24).view(2, 12) * 7 % 64
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_of_codes_is_that_of_what_they_decode_to(family: str, name: str) -> None:
    model = quantize_experts(tiny(family), name)
    assert sum("experts.gate_up_proj_scales" in key for key in model.state_dict()) == 2
    truth, want = loss_and_gradients(with_decoded(model))
    loss, got = loss_and_gradients(model)
    assert abs(loss - truth) <= 1e-5
    assert got.keys() == {key for key in want if not key.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    for key, value in got.items():
        assert (value - want[key]).norm() <= 2e-5 * want[key].norm() + 1e-9, key


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_pefts_adapters_go_on_codes(family: str) -> None:
    peft = pytest.importorskip("peft")
    model = quantize_experts(tiny(family), "nf4")
    plain = with_decoded(model)
    found = []
    for base in (model, plain):
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(target_modules=[], target_parameters=names, r=4, lora_alpha=8)
        adapted = peft.get_peft_model(base, config)
        torch.manual_seed(3)
        for key, p in sorted(adapted.named_parameters()):
            if "lora" in key:
                p.data.normal_(std=0.1)
        found.append(loss_and_gradients(adapted))
    (loss, got), (truth, want) = found
    assert abs(loss - truth) <= 1e-5
    assert got.keys() == want.keys()
    assert len(got) == 8
    for key, value in got.items():
        assert (value - want[key]).norm() <= 2e-5 * want[key].norm() + 1e-9, key


def test_a_checkpoint_is_quantized_while_it_is_read(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TrimtabExpertsConfig("nf4"), experts_implementation="trimtab", dtype="float32"
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
        TrimtabExpertsConfig("fp8")
