"""A selection bias that has moved beside adapters of peft is in their files, and what opens these routes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainingArguments

from helpers.families import build_model
from trimtab.errors import ConfigError
from trimtab.integrations.transformers import LoadBalancer, LoadBalancerCallback
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.routing.observers import ADDED

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = {"deepseek_v3": False, "ernie4_5_moe": False, "qwen3_moe": True}
"""A buffer, a parameter, and one that is added."""
IDS = torch.randint(2, 64, (16, 12), generator=torch.Generator().manual_seed(0))
LORA: dict[str, Any] = {"r": 2, "target_modules": ["o_proj"]}


def adapted(family: str, **more: Any) -> Any:
    model = build_model(family)
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(**LORA, **more)).train()


def biases(model: Any) -> dict[str, Tensor]:
    found = {}
    for place in find_routers(model):
        owner, name = (place.bias_in, place.bias) if place.bias else (place.module, ADDED)
        found[place.name] = getattr(owner, name).detach().clone()
    return found


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def moved(model: Any, family: str, rule: str = "sign", **more: Any) -> LoadBalancer:
    """By two steps."""
    balance = LoadBalancer(model, bias=rule, rate=0.05, add_bias=FAMILIES[family], **more)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        balance.step()
    assert all(bias.any() for bias in biases(model).values())
    return balance


def is_the_same(model: Any, again: Any, family: str, folder: Path) -> None:
    if FAMILIES[family]:
        LoadBalancer(again, bias=None, add_bias=folder)
    for name, bias in biases(model).items():
        assert torch.equal(biases(again)[name], bias), name
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("family", "rule"),
    [*((family, "sign") for family in FAMILIES), ("ernie4_5_moe", "quantile"), ("qwen3_moe", "quantile")],
)
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["gate"]}], ids=["", "router saved whole"])
def test_a_bias_is_saved_with_the_adapter_and_read_back(
    family: str, rule: str, more: dict[str, Any], tmp_path: Path
) -> None:
    model = adapted(family, **more)
    moved(model, family, rule)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build_model(family), tmp_path)
    is_the_same(model, again, family, tmp_path)
    merged = again.merge_and_unload()
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)


def test_every_adapter_of_several_has_it_and_others_files_are_left(tmp_path: Path) -> None:
    model = adapted("deepseek_v3")
    model.add_adapter("second", LoraConfig(**LORA))
    moved(model, "deepseek_v3")
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.rglob("*.safetensors"))
    model.save_pretrained(tmp_path)
    for file in (tmp_path / "adapter_model.safetensors", tmp_path / "second" / "adapter_model.safetensors"):
        held = load_file(file)
        assert sum("lora_" in name for name in held) == 2 * len([m for m in model.modules() if hasattr(m, "lora_A")])
        assert [held[f"base_model.model.{name}.e_score_correction_bias"].tolist() for name in biases(model)] == [
            bias.tolist() for bias in biases(model).values()
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_goes_on_with_the_bias_that_it_had(family: str, tmp_path: Path) -> None:
    data = Dataset.from_dict({"input_ids": IDS.tolist(), "labels": IDS.tolist()})

    def train(steps: int, folder: Path, resume: Path | None = None) -> Any:
        args = TrainingArguments(
            str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True,
            disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(adapted(family), args, train_dataset=data)
        trainer.add_callback(LoadBalancerCallback(trainer, rate=0.05, add_bias=FAMILIES[family]))
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer.model

    whole = train(4, tmp_path / "whole")
    resumed = train(4, tmp_path / "resumed", tmp_path / "whole" / "checkpoint-2")
    assert all(bias.any() for bias in biases(whole).values())
    for name, bias in biases(whole).items():
        assert torch.equal(biases(resumed)[name], bias), name
    again = PeftModel.from_pretrained(build_model(family), tmp_path / "whole" / "checkpoint-4")
    is_the_same(whole, again, family, tmp_path / "whole" / "checkpoint-4")


def test_what_could_not_be_saved_is_refused() -> None:
    model = adapted("deepseek_v3")
    with pytest.raises(ConfigError, match="hand in the PeftModel"):
        LoadBalancer(model.base_model.model)
    LoadBalancer(model.base_model.model, bias=None, aux_loss=0.1).remove()
    plain = build_model("deepseek_v3").train()
    balance = LoadBalancer(plain)
    behind = get_peft_model(plain, LoraConfig(**LORA))
    behind(input_ids=IDS, labels=IDS).loss.backward()
    with pytest.raises(ConfigError, match="that get_peft_model returns"):
        balance.step()
