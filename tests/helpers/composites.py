"""Tiny composite models: the families of transformers' image-text registry alone whose text part may have experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.family_config import rope, tiny_config
from trimtab.train.presets import byte_tokenizer

TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model"), 32),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "output_dim"), 64),  # that of the text part
    **dict.fromkeys(("projection_hidden_dim", "projection_intermediate_size", "downsample_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 24),
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("patch_size", "image_size"), 28),
    "head_dim": 16,
    "num_position_embeddings": 16,
    "max_position_embeddings": 64,
    "position_embedding_size": 64,
}
"""Sizes of towers, of images and of sound."""
PROJECTED = ("projector_hidden_size", "projection_hidden_size", "vision_hidden_size", "out_hidden_size")
"""Sizes that a composite configuration has itself."""
FIXED: dict[str, dict[str, Any]] = {
    "inkling_vision": {"num_hidden_layers": 6, "patch_size": 40},  # a layer for each factor of the patch
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": (8, 8, 8, 8), "depths": (1, 1, 1, 1)},
}
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe", {"moe_intermediate_size": [64, 64], "rope_parameters": rope([3, 3, 2])}),
    "glm4v_moe": ("glm4v_moe", {"rope_parameters": rope([2, 1, 1])}),
    "inkling_mm_model": ("inkling", {}),
    "kimi_k25": ("deepseek_v3", {}),
    "nemotron_h_omni": ("nemotron_h", {"moe_latent_size": 64}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {"moe_intermediate_size": 128}),  # 64 makes a stack that fits both ways
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_thinker", {"sliding_window": None}),  # which it does not heed
    "step3p7": ("step3p7", {"pad_token_id": 1}),  # not optional there
}
"""By family: what its text part is called among families with a class for it, and fields that it needs."""
SIZES = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), 264),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_hidden_size", "moe_intermediate_size"), 64),
    "eos_token_id": 256,
}
"""Of every text part: rows for the byte tokenizer, blocks of NF4."""


def tiny_tower(config: Any) -> Any:
    """A tower's configuration with every field that `TOWER` knows shrunk."""
    for name, value in (TOWER | FIXED.get(config.model_type, {})).items():
        if isinstance(getattr(config, name, None), (int, tuple)):
            setattr(config, name, value)
    for part in config.sub_configs:
        tiny_tower(getattr(config, part))
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return config


def composite_config(family: str, **text: Any) -> Any:
    """A tiny configuration of a family of the image-text registry, for the byte tokenizer; text: of its text part."""
    from transformers import CONFIG_MAPPING

    plain = CONFIG_MAPPING[family]()
    name, fields = TEXT.get(family, (family, {}))
    fields = SIZES | fields | text
    if "text_config" not in plain.sub_configs:
        return _tiny_text(type(plain), name, fields)
    made = _tiny_text(type(plain.text_config), name, fields).to_dict()
    towers = {part: getattr(plain, part) for part in plain.sub_configs if part != "text_config"}
    parts = {part: tiny_tower(tower).to_dict() for part, tower in towers.items() if tower is not None}
    own = {part: SIZES["hidden_size"] for part in PROJECTED if part in plain.__dict__}
    return type(plain)(text_config=made, **parts, **own)


def _tiny_text(cls: type, family: str, fields: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    return tiny_config(cls, family, **{name: value for name, value in fields.items() if name in known})


def save_composite(family: str, folder: Path, **text: Any) -> Path:
    """A checkpoint of `composite_config`, the byte tokenizer and a file of a processor."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(composite_config(family, **text), dtype=torch.float32)
        for parameter in model.parameters():  # routers of some families begin with ties
            nn.init.normal_(parameter, 0.0, 0.1) if parameter.ndim >= 2 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder


FAMILIES = (
    "aria", "deepseek_ocr2", "ernie4_5_vl_moe", "glm4v_moe", "glm5_next", "hy_v4_vl", "inkling2", "inkling2_loop",
    "inkling_mm_model", "kimi_k25", "minimax_m3_vl", "mistral4", "mistral_large4", "muse_spark", "nemotron_h_omni",
    "qwen3_omni_moe_thinker", "qwen3_vl_moe", "unlimited_ocr",
)  # fmt: skip
