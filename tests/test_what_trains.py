"""What is trained, frozen or quantized is counted by kind, of our own layers."""

from __future__ import annotations

import torch
from torch import nn

import trimtab
from trimtab.integrations.transformers.summary import Amount


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        router = trimtab.RouterConfig(num_experts=4, top_k=2)
        self.embed = nn.Embedding(10, 64)
        self.attn = nn.Linear(64, 64, bias=False)
        self.moe = trimtab.MoEConfig(dim=64, hidden=64, router=router, shared_hidden=32).build()
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10, bias=False)
        self.head.weight = self.embed.weight  # counts once


def test_a_model_of_one_s_own() -> None:
    model = Model()
    found = trimtab.summary(model)
    assert found.amounts == {
        ("embeddings", "trained"): Amount(640, 2560), ("attention", "trained"): Amount(4096, 4 * 4096),
        ("router", "trained"): Amount(256, 1024), ("routed experts", "trained"): Amount(4 * 3 * 4096, 16 * 3 * 4096),
        ("shared experts", "trained"): Amount(3 * 2048, 12 * 2048), ("other", "trained"): Amount(128, 512),
    }  # fmt: skip
    assert found.of().count == sum(p.numel() for p in model.parameters())


def test_codes_count_as_what_they_stand_for_and_adapters_as_their_experts() -> None:
    model = Model()
    values = sum(p.numel() for p in model.moe.experts.parameters())
    model.moe.experts.quantize_("nf4")
    held = sum(p.numel() * p.element_size() for p in model.moe.experts.parameters())
    assert 0 < held < values
    trimtab.add_adapter(model, rank=2)
    model.norm.requires_grad_(False)
    found = trimtab.summary(model)
    assert found.of("routed experts", "quantized") == Amount(values, held)
    assert found.of("routed experts", "trained").count == 4 * 2 * (64 + 128 + 64 + 64)
    assert found.of("routed experts", "frozen") == Amount()
    assert found.of("other", "frozen").count == 128
    whole = torch.nn.ModuleDict({"layers": nn.ModuleList([model])})
    assert trimtab.summary(whole).amounts == found.amounts
    lines = str(found).splitlines()
    assert lines[0].split() == ["trained", "frozen", "quantized"]
    assert lines[2].split() == f"routed experts 2,560 (10.2 kB) - {values:,} ({held / 1e3:.3g} kB)".split()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "router", "routed experts", "shared experts", "attention", "embeddings", "other", "all",
    ]  # fmt: skip
