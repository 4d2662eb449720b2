"""Ranks over Gloo against their plans: bytes of tensors at the peak, with the rows that these ranks have exchanged.

python -m plan.test_planned_ranks      all cases, and how far plans are off
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from helpers.planned_ranks import plan_on_rank, run_on_rank
from helpers.ranks import run_ranks
from plan.hooked import compiled_hook, under
from trimtab.plan.traffic import Traffic
from trimtab.train.config import Mesh, TrainConfig

SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
SAMPLE = ("ep 2, replicas", "ep 2, adapters over codes")
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ep 2": ("qwen3", 2, {"ep": 2}), "ep 2, recompute": ("qwen3", 2, {"ep": 2, "gradient_checkpointing": True}),
    "ep 2 x tp 2": ("qwen3", 2, {"ep": 2, "tp": 2}), "ep 2, twice": ("qwen3", 2, {"ep": 2, "grad_accum": 2}),
    "ep 2 x fsdp 4, mixed": ("qwen3", 4, {"ep": 2, "fsdp": 4, "dtype": "bfloat16"}), "ep 4": ("deepseek", 4, {"ep": 4}),
    "ep 2, replicas": ("qwen3", 2, {"ep": 2, "replicate_experts": "0.0", "copy_cost": 1}),
    "ep 2, muon": ("qwen3", 2, {"ep": 2, "optim": "muon"}), "ep 2, adapters": ("qwen3", 2, {"ep": 2, "lora": 8}),
    "ep 2, adapters over codes": ("qwen3", 2, {"ep": 2, "lora": 8, "quantize": "nf4"}),
}  # fmt: skip


def source_of(family: str) -> Any:
    from transformers import DeepseekV3Config, Qwen3MoeConfig

    if family == "qwen3":
        return Qwen3MoeConfig(
            **SIZES, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256, intermediate_size=512
        )
    return DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4, "head_dim": 16}, n_routed_experts=16, num_experts_per_tok=4, n_group=4,
        moe_intermediate_size=256, intermediate_size=512, topk_group=2, n_shared_experts=1, first_k_dense_replace=1,
        q_lora_rank=64, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32,
        num_nextn_predict_layers=0,
    )  # fmt: skip


@pytest.mark.parametrize("case", SAMPLE)
def test_ranks_hold_what_is_planned(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, ranks, options = CASES[case]
    source = source_of(family)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(source).save_pretrained(tmp_path)
    asked = {"seq_len": 256, "batch_size": 2, "kernels": "grouped_mm"} | options
    config = TrainConfig(model=str(tmp_path), **asked).resolved()
    mesh = Mesh.of(config, world=ranks, num_experts=16)
    told = under(compiled_hook(tmp_path), run_ranks, run_on_rank, ranks, tmp_path, config, mesh, deadline=240.0)
    worst = plan_on_rank(source, config, mesh, 0, Traffic(skew="worst"))
    for rank, (held, recorded) in enumerate(told):
        plan = plan_on_rank(source, config, mesh, rank, recorded)
        print(f"{case}, rank {rank}: run {held}, plan {plan / held - 1:+.2%}, worst {worst / held - 1:+.2%}")
        assert abs(plan - held) <= 0.03 * held + 20e6
        assert worst >= held


def main() -> None:
    for case in sys.argv[1:] or CASES:
        with TemporaryDirectory() as folder:
            test_ranks_hold_what_is_planned(case, Path(folder))


if __name__ == "__main__":
    main()
