"""Shrinks any MoE configuration of transformers to a toy: by field name first, by family where that fails."""

from __future__ import annotations

import dataclasses
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "unpadded_vocab_size": 64,
    "use_cache": False,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "intermediate_size": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "moe_hidden_size": 24,
    # shared experts and the dense layers among the sparse ones
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "dense_intermediate_size": 24,
    "prefix_dense_intermediate_size": 24,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "mlp_layer_types": ["sparse", "sparse"],
    "mlp_only_layers": [],
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    # low-rank attention and its indexer
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    # linear attention and state spaces
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "block_size": 16,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "router_hidden_size": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "hc_mult": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "rel_extent": 16,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    # nothing random in a forward
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def _rope(mrope_section: list[int]) -> dict[str, Any]:
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
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 8], "rope_parameters": _rope([1, 1, 2])},
    "glm4v_moe": {"rope_parameters": _rope([1, 1, 0])},
    "hy_v4_vl": {"rope_parameters": _rope([1, 1, 2])},
    # no layer of two is looped by default: here the second is, so its experts run twice
    "inkling2_loop": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    # the attention's index has no rotary part and pools keys in blocks
    "glm5_next": {"qk_rope_head_dim": 0, "index_kpool": 4},
    # the talker's block reads a width that its configuration does not declare
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts": {"shared_expert_intermediate_size": 16},
    # the full-attention layers' indexer has no default sizes
    "qwen4_exp": {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    # the architecture has exactly one expert per token
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(config_class: type, family: str, **more: Any) -> Any:
    """An instance of `config_class` with every field that `SMALL` knows shrunk, then the family's own overrides."""
    fields = {f.name for f in dataclasses.fields(config_class)}
    values = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no grouped heads
    return config_class(**(values | FAMILY.get(family, {}) | more))
