"""A tiny model of a family in Trainers of transformers and TRL: options, sequences, a tokenizer of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset


def options(folder: Path | str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 2, "save_strategy": "no",
        "gradient_accumulation_steps": 2, "learning_rate": 0.05, "logging_steps": 3, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "bf16": False, "seed": 0,
    } | more  # fmt: skip


def sequences(count: int = 16) -> Dataset:
    """Of other lengths, to be padded."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (count,), generator=draw).tolist()
    return Dataset.from_dict({"input_ids": [torch.randint(2, 64, (n,), generator=draw).tolist() for n in lengths]})


def sft(model: Any, config: dict[str, Any], **more: Any) -> Any:
    """TRL's trainer over `sequences`. more: for it, beside its configuration."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    data = sequences()
    return SFTTrainer(
        model=model, args=SFTConfig(**config), train_dataset=data, eval_dataset=data, processing_class=tokenizer, **more
    )  # fmt: skip
