"""TRL's trainers with `peft_config=`: the losses of transformers' own loop, and the adapter alone is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from helpers.families import build_model
from helpers.peft_case import lora

pytestmark = pytest.mark.usefixtures("registered", "one_thread")


def losses(implementation: str, folder: Path) -> list[float]:
    from trl import SFTConfig, SFTTrainer

    model = build_model("qwen3_moe")
    model.set_experts_implementation(implementation)
    drawn = torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(0))
    config = SFTConfig(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, bf16=False,
        learning_rate=0.05, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=0,
        save_strategy="steps", save_steps=3, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=config, train_dataset=Dataset.from_dict({"input_ids": drawn.tolist()}),
        processing_class=_tokenizer(), peft_config=lora(model, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _tokenizer() -> object:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )


def test_sft_with_a_peft_config(tmp_path: Path) -> None:
    wanted, got = losses("eager", tmp_path / "eager"), losses("trimtab", tmp_path / "trimtab")
    assert len(got) == 3
    assert got == pytest.approx(wanted, abs=2e-3)
    saved = load_file(tmp_path / "trimtab" / "checkpoint-3" / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert all(bool(t.any()) for t in saved.values()), "B begins as zeros"
    assert any(".experts.base_layer.lora_A." in name for name in saved)
