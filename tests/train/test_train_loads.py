"""Loads are counted once per token and choice; the balance loss does not depend on how ranks share a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recompute

from trimtab.convert.layouts import experts_modules
from trimtab.errors import ConfigError
from trimtab.train.loads import LoadCounter, balance_loss


class Experts(torch.nn.Module):
    """What the registry's decorator leaves on an experts module, and a forward that accepts anything."""

    has_gate, num_experts = True, 4

    def _apply_gate(self) -> None: ...

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return x * top_k_weights.sum()


def test_counts_choices_once_even_when_recomputed() -> None:
    model = torch.nn.ModuleDict({"a": Experts(), "b": Experts()})
    model["b"].num_experts = 2  # as after sharding: the counter must not look at it
    counter = LoadCounter(model, {"a": 4, "b": 4}, torch.device("cpu"))
    x = torch.ones(3, 2, requires_grad=True)
    ids = torch.tensor([[0, 1], [0, 3], [-1, 4]])
    weights = torch.ones(3, 2)
    recompute(model["a"], x, ids, weights, use_reentrant=False).sum().backward()
    model["b"](x, top_k_index=ids[:2], top_k_weights=weights[:2])
    first = counter.end_batch()
    assert counter.split(first.tolist()) == {"a": [2, 1, 0, 1], "b": [2, 1, 0, 1]}
    counter.real = torch.tensor([True, False, True])  # the second token is padding
    model["a"](x, ids, weights)
    assert counter.split(counter.end_batch().tolist())["a"] == [1, 1, 0, 0]
    assert counter.split(counter.take().tolist())["a"] == [3, 2, 0, 1]
    assert counter.take().sum() == 0


def test_experts_are_found_in_a_transformers_model(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert list(experts_modules(model)) == [f"model.layers.{i}.mlp.experts" for i in range(2)]


def loss_of(logits: list[torch.Tensor], ids: list[torch.Tensor], real: torch.Tensor | None, sums: Any) -> torch.Tensor:
    """The balance loss of layers that have run with these choices."""
    sizes = {str(i): logits[i].shape[1] for i in range(len(ids))}
    model = torch.nn.ModuleDict({name: Experts() for name in sizes})
    counter = LoadCounter(model, sizes, torch.device("cpu"))
    counter.real = real
    for experts, chosen in zip(model.values(), ids, strict=True):
        experts(torch.ones(len(chosen), 2), chosen, torch.ones(chosen.shape))
    return balance_loss(logits, counter, counter.end_batch(), sums)


@pytest.mark.parametrize("shares", [2, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_balance_loss_of_shares_averages_to_the_whole(shares: int, padded: bool) -> None:
    """With f of the experts that ran, which a selection bias has chosen here, and without padded tokens."""
    torch.manual_seed(0)
    logits = [torch.randn(16, 6, requires_grad=True), torch.randn(16, 8, requires_grad=True)]
    ids = [(one + 3 * torch.randn(one.shape[1])).topk(2).indices for one in logits]
    real = torch.rand(16) < 0.6 if padded else torch.ones(16, dtype=torch.bool)
    whole = loss_of(logits, ids, real if padded else None, lambda sums: sums)
    truth = [
        one.shape[1]
        * (i[real].flatten().bincount(minlength=one.shape[1]) / real.sum() * one.softmax(-1)[real].mean(0)).sum()
        for one, i in zip(logits, ids, strict=True)
    ]
    torch.testing.assert_close(whole, torch.stack(truth).mean())
    counts = [i[real].flatten().bincount(minlength=one.shape[1]) for one, i in zip(logits, ids, strict=True)]
    summed = torch.cat([*counts, torch.tensor([int(real.sum()), shares])])
    parts = [
        loss_of(
            [one.chunk(shares)[n] for one in logits],
            [i.chunk(shares)[n] for i in ids],
            real.chunk(shares)[n],
            lambda _: summed,
        )
        for n in range(shares)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
    theirs = torch.autograd.grad(whole, logits)
    for one, other in zip(torch.autograd.grad(torch.stack(parts).mean(), logits), theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_even_load_costs_top_k() -> None:
    even = 5.0 * torch.eye(4).repeat(3, 1)
    torch.testing.assert_close(loss_of([even], [even.topk(1).indices], None, lambda x: x), torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"router logits of 2 layers, but 1 with experts: .* router_aux_loss_coef"):
        loss_of([even, even], [even.topk(1).indices], None, lambda x: x)
