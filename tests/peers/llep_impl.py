"""LLEP, Least-Loaded Expert Parallelism: `gptoss_llep_forward`, which moves tokens and weights to less loaded ranks.

Its experts are gpt-oss': (up + 1) * gate * sigmoid(alpha * gate), biased, clamped. With alpha 1, no clamp within reach
and a bias of -1 for up they are the truth's SwiGLU, to the rounding of up - 1 + 1: so it is judged in float64.
`min_tokens_per_gemm` is 1, or it would leave the few tokens of a case where they are. The router is the ledger's.

Legend: N tokens, K experts per token, E experts, e experts of this rank, D model dim, F hidden dim, I = 2F.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
from llep.gpt_oss_llep import gptoss_llep_forward
from torch import Tensor

from peers import subject


class Layers(subject.FunctionLayers):
    """Gate and up lie side by side, both weights transposed."""

    def params(self, up_eID: Tensor, down_eDF: Tensor) -> dict[str, Tensor]:
        gate_up = up_eID.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).mT
        bias = torch.tensor([0.0, -1.0]).repeat(self.sizes.hidden).expand(len(gate_up), -1)
        biases = {"gate_up_bias": bias, "down_bias": torch.zeros(len(gate_up), self.sizes.dim)}
        return {"gate_up": gate_up, "down": down_eDF.mT, **biases}

    def run(self, layer: subject.OwnRouter, h: Tensor, scores_NE: Tensor, ids_NK: Tensor) -> Tensor:
        return gptoss_llep_forward(
            h, ids_NK, scores_NE, layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias,
            self.sizes.num_experts, len(layer.gate_up), layer.group, limit=1e30, alpha=1.0, min_tokens_per_gemm=1,
        )  # fmt: skip

    def as_the_truth(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return up.mT.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2), down.mT


class Impl(subject.Impl):
    """All weights and tokens may move: `max_tokens_factor` 1.1, its default."""

    name = "llep"
    layers = Layers

    def lacking(self, t, pattern) -> dict[str, bool]:
        return {"it is one function over an expert-parallel group": t.tp > 1 or t.data != "none" or t.cp > 1}
