"""Which weights get adapters: by kind, in every family; and what a name that is wrong is told."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab
from helpers.families import build_config, build_model, experts_modules, family_names, model_class
from trimtab.errors import ConfigError
from trimtab.integrations.transformers import lora_config, quantize_experts
from trimtab.integrations.transformers.lora import TARGETS

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("registered")


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return model_class(family)._from_config(build_config(family))


def kind_by_name(name: str, experts: tuple[str, ...]) -> str | None:
    """As a person who knows the families' names reads them; None for what may have no adapter."""
    if "shared" in name:
        return "shared experts" if not name.endswith(("shared_expert_gate.weight", "norm.weight")) else None
    if name.startswith(experts):
        return "routed experts" if not name.endswith(("bias", "norm.weight")) else None
    if re.search(r"\.(gate|router)\.", name):
        return "router"
    attention = re.search(r"\.(self_attn|linear_attn)\.|mixer\.[qkvo]_proj", name)
    return "attention" if attention and ".indexer." not in name else None


def test_each_kind_gets_adapters_in_every_family_and_nothing_else_does() -> None:
    """peft itself takes linear layers called gate_proj and the like for experts, and adapts those twice instead."""
    for family in family_names():
        model = on_meta(family)
        experts, linear = tuple(experts_modules(model)), dict(model.named_modules())
        wanted: Counter[str] = Counter()
        for name, p in model.named_parameters():
            kind, owner = kind_by_name(name, experts), linear[name.rpartition(".")[0]]
            stacked = p.ndim == 3 and kind in ("routed experts", "shared experts")
            routes = kind == "router" and name.endswith(".weight") and p.ndim == 2
            layer = type(owner) is torch.nn.Linear and p.ndim == 2
            if kind is not None and (stacked or routes or layer) and min(p.shape[-2:]) > 1:
                wanted[kind] += 2 * (p.shape[0] if stacked else 1) * sum(p.shape[-2:])
        assert {"routed experts", "router", "attention"} <= wanted.keys(), family
        frozen = {kind: trimtab.summary(model).of(kind).count for kind in wanted}
        targets = [target for target, kind in TARGETS.items() if kind in wanted]
        found = trimtab.summary(peft.get_peft_model(model, lora_config(model, rank=2, targets=targets)))
        assert {kind: found.of(kind, "trained").count for kind in wanted} == wanted, family
        assert found.of(state="trained").count == wanted.total(), family
        assert {kind: found.of(kind, "frozen").count for kind in wanted} == frozen, family


def test_a_name_that_trains_no_routed_expert_is_an_error() -> None:
    model = on_meta("qwen2_moe")
    with pytest.raises(
        ConfigError, match=r"up_proj: of experts it matches shared ones alone, mlp.shared_expert.up_proj.weight, .*"
    ):
        lora_config(model, rank=2, targets=["attention", "up_proj"])
    with pytest.raises(ConfigError) as error:
        lora_config(model, rank=2, targets=["w1"])
    parts = {
        "w1": "Qwen2MoeForCausalLM has nothing", "experts": "mlp.experts.gate_up_proj, mlp.experts.down_proj",
        "router": "mlp.gate", "shared": "mlp.shared_expert.gate_proj", "attention": "self_attn.q_proj",
    }  # fmt: skip
    for target, there in parts.items():
        assert f"{target}: {there}" in str(error.value)
    with pytest.raises(ConfigError, match=r"shared: Qwen3MoeForCausalLM has nothing .* experts: mlp"):
        lora_config(on_meta("qwen3_moe"), rank=2, targets=["shared"])


def test_names_as_peft_takes_them() -> None:
    config = lora_config(
        on_meta("qwen2_moe"), rank=4, alpha=5, targets=["q_proj", "shared_expert.up_proj", "down_proj"]
    )
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 5, {"self_attn.q_proj"})
    assert config.target_parameters == [
        "mlp.experts.down_proj", "mlp.shared_expert.down_proj.weight", "mlp.shared_expert.up_proj.weight",
    ]  # fmt: skip


def adapted(how: str) -> Any:
    """A model with adapters of peft's, wrapped as people wrap it."""
    model = on_meta("qwen3_moe")
    if how == "prompts":
        return peft.get_peft_model(
            build_model("qwen3_moe"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        )
    config = lora_config(model, rank=2, targets=["experts"] if how == "experts" else ["attention"])
    if how == "injected":
        return peft.inject_adapter_in_model(config, model)
    made = peft.get_peft_model(model, config)
    wraps = {"compile": torch.compile, "list": lambda one: torch.nn.ModuleList([one])}
    return wraps.get(how, lambda one: one)(made)


@pytest.mark.parametrize("how", ["plain", "experts", "compile", "list", "injected", "prompts"])
def test_a_model_with_adapters_is_refused_with_the_way_out(how: str) -> None:
    model = adapted(how)
    with pytest.raises(ConfigError, match=rf"^lora_config: this {type(model).__name__} has adapters .*unload\(\)"):
        lora_config(model, rank=2, targets=["attention"])
    if how in ("plain", "experts"):
        before = {name for name, _ in on_meta("qwen3_moe").named_parameters()}
        base = model.unload()
        assert {name for name, _ in base.named_parameters()} == before
        second = lora_config(base, rank=4, targets=["attention"])
        assert second.target_modules == {f"self_attn.{name}_proj" for name in "qkvo"}


def test_an_adapter_of_all_kinds_on_codes_comes_back(tmp_path: Path) -> None:
    """Its configuration and its files say the same to peft when they are read."""
    made = []
    for _ in range(2):
        model = build_model("deepseek_v3")
        model.set_experts_implementation("trimtab")
        made.append(quantize_experts(model, "int8"))
    first = peft.get_peft_model(made[0], lora_config(made[0], rank=2, targets=list(TARGETS)))
    with torch.no_grad():
        for p in first.parameters():
            if p.requires_grad:
                p.normal_(std=0.2)
    first.save_pretrained(tmp_path)
    second = peft.PeftModel.from_pretrained(made[1], tmp_path, is_trainable=True)
    found = trimtab.summary(second)
    assert found.amounts == trimtab.summary(first).amounts
    assert all(found.of(kind, "trained").count for kind in TARGETS.values())
    assert found.of("routed experts", "quantized").count == 2 * 3 * 8 * 32 * 16
    ids = torch.arange(12)[None]
    assert torch.equal(first(input_ids=ids).logits, second(input_ids=ids).logits)
