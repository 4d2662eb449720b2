"""Shrinks any MoE configuration of transformers to a toy: by field name first, by family where that fails."""

from __future__ import annotations

import dataclasses
from typing import Any

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configurations have for the number of experts."""
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), 64),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    # experts, shared experts and the dense layers among the sparse ones
    **dict.fromkeys(EXPERTS, 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "n_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(("intermediate_size", "moe_hidden_size"), 24),
    "moe_intermediate_size": 16,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 24),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "expert_layer_offset"), 0),
    "mlp_layer_types": ["sparse", "sparse"],
    "mlp_only_layers": [],
    "expert_layer_period": 1,
    # attention: plain, low-rank, indexed, linear; and state spaces
    **dict.fromkeys(("num_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "router_hidden_size", "rel_extent"), 16),
    **dict.fromkeys(("index_topk", "o_lora_rank", "hc_lowrank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("index_n_heads", "o_groups", "n_groups", "hc_mult", "hc_count"), 2),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "ssm_state_size"), 8),
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "block_size": 16,
    **dict.fromkeys(("sliding_window", "sliding_window_size"), 8),
    # nothing random in a forward
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise", "attention_dropout", "hidden_dropout"), 0.0),
}


def rope(mrope_section: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": mrope_section}


# Each entry is needed: the comment says what stops the family without it.
FAMILY: dict[str, dict[str, Any]] = {
    # two layers default to linear attention alone; one of each is what the family is about
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # no default layer types
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # one of each mixture layer: the first kind looks its experts up by token id
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    # a mixture layer is a layer of its own
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 16},
    # the router learns from near ties alone, within this margin (in eval mode nothing is drawn)
    "phimoe": {"router_jitter_noise": 0.5},
    # heads of full-attention layers are 512 wide by default; gemma4's mixture layers are off by default
    "diffusion_gemma": {"global_head_dim": 8},
    "gemma4": {"global_head_dim": 8, "enable_moe_block": True},
    # one width for text experts, one for vision experts; rotary sections that fit a head of 8
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 8], "rope_parameters": rope([1, 1, 2])},
    "glm4v_moe": {"rope_parameters": rope([1, 1, 0])},
    "hy_v4_vl": {"rope_parameters": rope([1, 1, 2])},
    # no layer of two is looped by default: here the second is, so its experts run twice
    "inkling2_loop": {
        "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    # the attention's index has no rotary part and pools keys in blocks
    "glm5_next": {"qk_rope_head_dim": 0, "index_kpool": 4},
    # the talker's block reads a width that its configuration does not declare
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts": {"shared_expert_intermediate_size": 16},
    # the full-attention layers' indexer has no default sizes
    "qwen4_exp": {
        "layer_types": ["linear_attention", "full_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    # the architecture has exactly one expert per token
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(config_class: type, family: str, **more: Any) -> Any:
    """An instance of `config_class` with every field that `SMALL` knows shrunk, then the family's own overrides."""
    fields = {f.name for f in dataclasses.fields(config_class)}
    values = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no grouped heads
    return config_class(**(values | FAMILY.get(family, {}) | more))
