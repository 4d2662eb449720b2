"""Tiny composite models: the families of transformers' image-text registry alone whose text part may have experts."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT

from helpers.family_config import EXPERTS, rope, tiny_config
from trimtab.integrations.transformers.composite import REFUSED, language_model_class
from trimtab.train.config import TrainConfig
from trimtab.train.plan import Plan, plan_run
from trimtab.train.presets import byte_tokenizer
from trimtab.train.session import run_session

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
FAMILIES = (
    "aria", "deepseek_ocr2", "ernie4_5_vl_moe", "glm4v_moe", "glm5_next", "hy_v4_vl", "inkling2", "inkling2_loop",
    "inkling_mm_model", "kimi_k25", "minimax_m3_vl", "mistral4", "mistral_large4", "muse_spark", "nemotron_h_omni",
    "qwen3_omni_moe_thinker", "qwen3_vl_moe", "unlimited_ocr", "internvl",
)  # fmt: skip
"""Those that are trained."""
ALL = "experts,attention"
RENAMED = {"deepseek_ocr2": ALL, "unlimited_ocr": ALL, "mistral_large4": "experts"}
"""By family: targets whose adapters peft renames as it loads them."""
SHARDED_WRONG = ("ernie4_5_vl_moe", "glm5_next", "inkling2_loop", "minimax_m3_vl", "qwen3_vl_moe")
"""What transformers loads wrong, or not at all, over ranks that have a part of each weight."""
RATE = 0.5
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


def composite_config(family: str) -> Any:
    """A tiny configuration of a family of the image-text registry, for the byte tokenizer."""
    plain = CONFIG_MAPPING[family]()
    name, fields = TEXT.get(family, ("qwen3_moe" if _is_wrapper(family) else family, {}))
    fields = SIZES | fields
    if "text_config" not in plain.sub_configs:
        return _tiny_text(type(plain), name, fields)
    kind = CONFIG_MAPPING[name] if _is_wrapper(family) else type(plain.text_config)
    made = _tiny_text(kind, name, fields).to_dict()
    towers = {part: getattr(plain, part) for part in plain.sub_configs if part != "text_config"}
    parts = {part: tiny_tower(tower).to_dict() for part, tower in towers.items() if tower is not None}
    own = {part: SIZES["hidden_size"] for part in PROJECTED if part in plain.__dict__}
    return type(plain)(text_config=made, **parts, **own)


def _is_wrapper(family: str) -> bool:
    """True if the text part may be of any family, and is one without experts where nothing else is said."""
    config = CONFIG_MAPPING[family]()
    chosen = config.sub_configs.get("text_config") is AutoConfig
    return chosen and not any(hasattr(config.text_config, field) for field in EXPERTS)


def _tiny_text(cls: type, family: str, fields: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    return tiny_config(cls, family, **{name: value for name, value in fields.items() if name in known})


def save_composite(family: str, folder: Path) -> Path:
    """A checkpoint of `composite_config`, the byte tokenizer and a file of a processor."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(composite_config(family), dtype=torch.float32)
        for parameter in model.parameters():  # routers of some families begin with ties
            nn.init.normal_(parameter, 0.0, 0.1) if parameter.ndim >= 2 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder


def _wraps_experts(family: str) -> bool:
    """True if a text part of Qwen3-MoE is taken, and alone has the logits of the whole model."""
    ids = torch.arange(100, 110)[None]
    try:
        config = composite_config(family)
        whole = AutoModelForImageTextToText.from_config(config).eval()
        part = language_model_class(config).from_config(config).eval()
        missing = part.load_state_dict(whole.state_dict(), strict=False).missing_keys
        found, wanted = (model(input_ids=ids).logits for model in (part, whole))
    except Exception:  # of the many kinds that such a text part, or a package, is missing
        return False
    assert not missing, family
    assert torch.equal(found, wanted), family
    return True


def listed() -> str:
    """The lists of docs/howto/train.md, of the registry that is installed."""
    alone = [name for name in IMAGE_TEXT if name not in CAUSAL]
    sparse = [n for n in alone if any(hasattr(CONFIG_MAPPING[n]().get_text_config(), field) for field in EXPERTS)]
    wrappers = [name for name in alone if _is_wrapper(name) and _wraps_experts(name)]
    unrun = [name for name in sparse if name not in REFUSED and name not in FAMILIES]
    lost = {what: [name for name in FAMILIES if RENAMED.get(name) == what] for what in (ALL, "experts")}
    rows = {
        "Trained": [name for name in sparse if name in FAMILIES],
        "Trained, where they wrap a language model with experts, as InternVL does Qwen3-MoE": wrappers,
        "Refused, for transformers runs their experts by code of their own": unrun,
        "Trained on one rank alone, for transformers loads parts of their weights wrong": SHARDED_WRONG,
        "Trained, but adapters are refused, for peft renames them as it loads them": lost[ALL],
        "Trained, but adapters of experts are refused, for peft renames them as it loads them": lost["experts"],
        **{f"Refused, for {why}": [name] for name, why in REFUSED.items()},
    }
    said = (f"* {what}: {', '.join(f'`{name}`' for name in sorted(names))}." for what, names in rows.items())
    return "\n".join(textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in said)


def options(base: Path, text: Path, out: Path, **more: Any) -> TrainConfig:
    """Two steps of SGD."""
    values: dict[str, Any] = {"seq_len": 32, "batch_size": 2, "max_steps": 2, "optim": "sgd", "lr": RATE, "warmup": 0}
    values |= {"scheduler": "constant_with_warmup", "weight_decay": 0.0}
    return TrainConfig(model=str(base), data=(str(text),), out=str(out), **values | more)


def train_composite(base: Path, text: Path, out: Path, **more: Any) -> Plan:
    """Run `trimtab train` with `options` in this process."""
    plan = plan_run(options(base, text, out, **more), 1)
    run_session(plan, prepared=False)
    return plan


def load_whole(folder: Path, **more: Any) -> Any:
    """By transformers alone: every tensor has a place, and every place a tensor."""
    model, report = AutoModelForImageTextToText.from_pretrained(
        folder, experts_implementation="eager", output_loading_info=True, **more
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model


if __name__ == "__main__":
    print(listed())
