"""transformers' Trainer resumes: with the experts of the checkpoint, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from helpers.families import build_model, experts_modules
from helpers.small_trainers import options
from trimtab.errors import InputError
from trimtab.integrations.transformers import register

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(model: nn.Module, folder: Path, **more: Any) -> Trainer:
    ids = torch.randint(2, 64, (8, 6), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    more = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 0.01} | more
    args = TrainingArguments(**options(folder, **more))
    return Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)


def experts_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for module in experts_modules(model).values() for p in module.parameters()]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])  # as it is called; by other names
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_trainer_resumes_the_experts_or_says_why_not(
    family: str, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    save = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda *a, **k: save(*a, **k | {"max_shard_size": shard}))
    made = build_model(family)
    whole = trainer(made, tmp_path)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    fresh = build_model(family)
    with torch.no_grad():
        for p in fresh.parameters():
            p.fill_(0.5)
    before = {name: p.clone() for name, p in fresh.state_dict().items()}
    with pytest.raises(InputError, match=r"experts\.0\.\w+.weight and \d+ more tensors.*from_pretrained\(CHECKPOINT\)"):
        trainer(fresh, tmp_path / "again").train(resume_from_checkpoint=str(checkpoint))
    if shard == "5GB":  # of one file nothing is loaded
        assert all(torch.equal(p, before[name]) for name, p in fresh.state_dict().items())
    how = made.config._experts_implementation
    again = AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation=how)
    trainer(again, tmp_path / "again").train(resume_from_checkpoint=str(checkpoint))
    assert all(map(torch.equal, experts_of(again), experts_of(made)))


def test_the_best_model_has_its_experts_or_is_not_loaded(tmp_path: Path) -> None:
    register()
    model = build_model("qwen3_moe")
    best = trainer(
        model, tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, learning_rate=1.0,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    with pytest.raises(InputError, match="load_best_model_at_end"):
        best.train()


def test_state_under_the_models_own_keys_passes() -> None:
    """As a Trainer that converts before it loads would have it."""
    register()
    model, other = build_model("qwen3_moe"), build_model("qwen3_moe")
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(0.5)
    other.load_state_dict(model.state_dict(), strict=False)
    assert all(map(torch.equal, experts_of(model), experts_of(other)))
    kept = {name: p for name, p in model.state_dict().items() if "experts" not in name}
    other.load_state_dict(kept, strict=False)


def test_a_strict_load_says_what_torch_says_and_values_on_meta_are_others() -> None:
    register()
    model = build_model("qwen3_moe")
    single = {"model.layers.0.mlp.experts.0.down_proj.weight": torch.zeros(16, 32)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*experts\.0\.down_proj"):
        model.load_state_dict(model.state_dict() | single)
    with pytest.raises(InputError, match="would not be loaded"):
        model.to("meta").load_state_dict(single, strict=False, assign=True)
