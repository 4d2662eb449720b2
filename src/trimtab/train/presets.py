"""Five small models, one of each well-known MoE family, with random weights from a seed, and their byte tokenizer.

A preset is written to disk once and then loaded like any checkpoint. Sizes are chosen to learn Python source in about
two minutes on two CPU cores. The tokenizer is a BPE without merges over the byte alphabet that `tokenizers` defines
(id = byte), then the special tokens; it needs no trimtab to open.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EOS, START, END = "<|eos|>", "<|start|>", "<|end|>"
SPECIALS = (EOS, START, END)
BYTE_VOCAB = 256
VOCAB = BYTE_VOCAB + 8
"""Room for the special tokens, and a size that 2, 4 and 8 ranks can share."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|start|>tools\\n' + (tools | tojson) + '<|end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}"
    "{% if part['type'] != 'text' %}{{ raise_exception('this tokenizer takes parts of text alone') }}{% endif %}"
    "{{ part['text'] }}"
    "{% endfor %}{% endif %}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)

IDENTITY = "init.json"
"""Lies beside the weights that a run has written to begin with and says whose they are."""

_SHARED = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "initializer_range": 0.05,
    "output_router_logits": True, "router_aux_loss_coef": 0.02, "use_cache": False,
    "bos_token_id": None, "eos_token_id": BYTE_VOCAB, "pad_token_id": BYTE_VOCAB,
}  # fmt: skip
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
         "norm_topk_prob": True},
    ),
    "mixtral": (
        "MixtralConfig",
        {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 192},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 96}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128,
         "sliding_window": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "intermediate_size": 256,
         "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 64,
         "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
         "num_nextn_predict_layers": 0},
    ),
}  # fmt: skip
PRESETS = {name: (kind, {**_SHARED, **sizes}) for name, (kind, sizes) in _OWN.items()}
"""By name: the class of the transformers configuration, and its fields."""


def preset_config(name: str) -> Any:
    """Build the transformers configuration of preset `name`."""
    import transformers

    kind, fields = PRESETS[name]
    return getattr(transformers, kind)(**fields)


def write_preset(name: str, seed: int, folder: Path) -> None:
    """Initialize preset `name` from `seed` and save model and byte tokenizer to `folder`, the same bits anywhere.
    Raises InputError where it cannot be written."""
    import torch
    from transformers import AutoModelForCausalLM

    from trimtab.convert.files import writing

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(preset_config(name), dtype=torch.float32)
    with writing(folder):
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)


def identity(model: str, seed: int) -> str:
    """Tell the weights that a run begins with from others: a preset's by its sizes, a folder's by its path."""
    made_of = PRESETS[model][1] if model in PRESETS else str(Path(model).resolve())
    return json.dumps({"model": model, "seed": seed, "made of": made_of}, indent=1, sort_keys=True) + "\n"


def byte_tokenizer() -> Any:
    """Build the byte tokenizer: a `PreTrainedTokenizerFast` of 259 ids with EOS and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    core = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=EOS, additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
