"""A tiny Qwen3-MoE with a dense layer in the middle, and what an inference engine would return for three samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from helpers.family_config import tiny_config

LAYERS, MOE, E, K = 3, (0, 2), 8, 2
LENGTHS = (7, 5, 9)
NAMES = ("model.layers.0.mlp.gate", "model.layers.2.mlp.gate")


def build(dtype: torch.dtype = torch.float64) -> Any:
    config = tiny_config(
        Qwen3MoeForCausalLM.config_class, "qwen3_moe", num_hidden_layers=LAYERS, mlp_only_layers=[1],
        norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    model = model.to(dtype).eval()
    model.set_experts_implementation("eager")
    return model


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, 64, (n,), generator=generator) for n in LENGTHS]


def records(dtype: torch.dtype = torch.int16) -> list[Tensor]:
    """[n - 1, layers, K] for each sample, as vLLM has them: distinct experts, and zeros in the dense layer."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for n in LENGTHS:
        ids = torch.rand(n - 1, LAYERS, E, generator=generator).argsort(-1)[..., :K]
        ids[:, 1] = 0
        found.append(ids.to(dtype))
    return found


def whole(sample: Tensor, n: int, start: int = 0) -> dict[str, list[Tensor]]:
    """By router: [n, K] of a sample alone, -1 where it has no record. By a loop over its tokens."""
    found = {}
    for name, layer in zip(NAMES, MOE, strict=True):
        ids = torch.full((n, K), -1)
        for i in range(sample.shape[0]):
            ids[start + i] = sample[i, layer].long()
        found[name] = [ids]
    return found
