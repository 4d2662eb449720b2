"""Cases of plans, drawn from a seed: a family, its sizes, and the options of a run."""

from __future__ import annotations

import random
from typing import Any

import transformers

from helpers.families import families, model_class
from helpers.family_config import FAMILY, tiny_config
from trimtab.train.config import TrainConfig
from trimtab.train.presets import PRESETS

FAMILIES = tuple(PRESETS)
OTHERS = sorted(name for name, f in families().items() if f.model_class.endswith("ForCausalLM") and name not in PRESETS)
HELD_OUT = random.Random(57).sample(OTHERS, 5)
"""Families that were not looked at while the planner was written."""


def drawn(seed: int) -> dict[str, Any]:
    """A case of 100 to 400 MB in float32 on one rank."""
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    hidden, heads = rng.choice([256, 384, 512]), rng.choice([4, 8])
    inner = rng.choice([128, 192, 256])
    experts, top_k = rng.choice([4, 8, 16]), rng.choice([1, 2, 4])
    kind = {
        "qwen3_moe": {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": inner,
                      "head_dim": hidden // heads},
        "olmoe": {"num_experts": experts, "num_experts_per_tok": top_k, "intermediate_size": inner},
        "mixtral": {"num_local_experts": experts, "num_experts_per_tok": top_k, "intermediate_size": inner,
                    "head_dim": hidden // heads},
        "gpt_oss": {"num_local_experts": experts, "num_experts_per_tok": top_k, "intermediate_size": inner,
                    "head_dim": hidden // heads},
        "deepseek_v3": {"n_routed_experts": 4 * max(experts // 4, 2), "num_experts_per_tok": min(top_k, 2),
                        "moe_intermediate_size": inner, "intermediate_size": 2 * hidden,
                        "first_k_dense_replace": rng.choice([1, 2])},
    }[family]  # fmt: skip
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads,
             "num_hidden_layers": rng.choice([3, 4, 5]), "vocab_size": rng.choice([1024, 8192, 32000])}  # fmt: skip
    if family == "gpt_oss":
        sizes["layer_types"] = [
            ("sliding_attention", "full_attention")[i % 2] for i in range(sizes["num_hidden_layers"])
        ]
    run = {
        "batch_size": rng.choice([1, 2, 4]), "seq_len": rng.choice([256, 512, 1024]),
        "grad_accum": rng.choice([1, 1, 2]), "gradient_checkpointing": rng.random() < 0.4,
        "optim": rng.choice(["adamw_torch", "adamw_torch_fused", "sgd"]),
    }  # fmt: skip
    return {"family": family, "sizes": sizes | kind, "run": run}


def held_out(family: str, layers: int = 4, **run: Any) -> dict[str, Any]:
    """A case of a family, whatever its fields are called."""
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size")
    sizes: dict[str, Any] = dict.fromkeys(names, 256)
    sizes |= {"num_hidden_layers": layers, "vocab_size": 8192, "max_position_embeddings": 1024}
    for name, values in ({"mlp_layer_types": ["sparse"]} | FAMILY.get(family, {})).items():
        if name.endswith("layer_types"):
            sizes[name] = (values * layers)[:layers]
    run = {"batch_size": 2, "seq_len": 512, "optim": "adamw_torch_fused"} | run
    return {"family": family, "sizes": sizes, "run": run}


def source_of(family: str, sizes: dict[str, Any]) -> Any:
    if family in PRESETS:
        kind, fields = PRESETS[family]
        return getattr(transformers, kind)(**{**fields, **sizes})
    kind = model_class(family).config_class
    made = tiny_config(kind, family)
    return tiny_config(kind, family, **{name: value for name, value in sizes.items() if hasattr(made, name)})


def configured(case: dict[str, Any]) -> tuple[Any, TrainConfig]:
    """The configuration of transformers, and that of the run."""
    options = {"dtype": "float32", "kernels": "grouped_mm"} | case["run"]
    config = TrainConfig(model=case["family"], data=("none",), out="none", **options).resolved()
    return source_of(case["family"], case["sizes"]), config
