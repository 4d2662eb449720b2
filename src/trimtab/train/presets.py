"""Five small models, one of each well-known MoE family: byte vocabulary, random weights from a seed.

A preset is written to disk once and then loaded like any checkpoint, so that all ranks agree on the weights.
Sizes are chosen to learn Python source in about two minutes on two CPU cores shared by four ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.train.tokens import BYTE_VOCAB, SPECIALS, byte_tokenizer

VOCAB = BYTE_VOCAB + 8
"""Room for the special tokens, and a size that 2, 4 and 8 ranks can share."""

IDENTITY = "init.json"
"""Lies beside the weights that a run has written to begin with: whose they are."""

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": BYTE_VOCAB,
    "pad_token_id": BYTE_VOCAB,
}


@dataclass(frozen=True)
class Preset:
    """One family's small model: `build()` gives its transformers configuration."""

    config_class: str
    sizes: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """The transformers configuration object."""
        import transformers

        make: Callable[..., Any] = getattr(transformers, self.config_class)
        return make(**{**_SHARED, **self.sizes})


PRESETS = {
    "qwen3_moe": Preset(
        "Qwen3MoeConfig",
        {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
         "norm_topk_prob": True},
    ),
    "mixtral": Preset(
        "MixtralConfig",
        {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 192},
    ),
    "olmoe": Preset(
        "OlmoeConfig",
        {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 96},
    ),
    "gpt_oss": Preset(
        "GptOssConfig",
        {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128,
         "sliding_window": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "deepseek_v3": Preset(
        "DeepseekV3Config",
        {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "intermediate_size": 256,
         "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 64,
         "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
         "num_nextn_predict_layers": 0},
    ),
}  # fmt: skip


def write_preset(name: str, seed: int, folder: Path) -> None:
    """Initialise preset `name` from `seed` and save model and byte tokenizer to `folder`, the same bits anywhere.

    Raises:
        InputError: it cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from trimtab.convert.safetensors_files import writing

    assert len(SPECIALS) <= VOCAB - BYTE_VOCAB
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(PRESETS[name].build(), dtype=torch.float32)
    with writing(folder):
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)


def is_written(whose: str, folder: Path) -> bool:
    """Whether `folder` holds, whole, the weights of that `identity`."""
    path = folder / IDENTITY
    return path.is_file() and path.read_text(encoding="utf-8") == whose


def identity(model: str, seed: int) -> str:
    """What tells the weights that a run begins with from others: of a preset its sizes, of a folder its path."""
    sizes = {**_SHARED, **PRESETS[model].sizes} if model in PRESETS else str(Path(model).resolve())
    return json.dumps({"model": model, "seed": seed, "made of": sizes}, indent=1, sort_keys=True) + "\n"
