"""Loads are counted once per token and choice; the balance loss does not depend on how ranks share a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recompute

from trimtab.convert.layouts import experts_modules
from trimtab.train.balance import balance_loss
from trimtab.train.loads import LoadCounter, load_metrics


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
    assert counter.split(counter.take().tolist()) == {"a": [2, 1, 0, 1], "b": [2, 1, 0, 1]}
    counter.close()
    model["a"](x, ids, weights)
    assert counter.take().sum() == 0


def test_load_metrics() -> None:
    assert load_metrics([4, 0, 2, 2]) == {"max_vio": 1.0, "dead_experts": 1, "tokens_per_expert": [4, 0, 2, 2]}
    assert load_metrics([0, 0])["max_vio"] == 0.0


def test_experts_are_found_in_a_transformers_model(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert list(experts_modules(model)) == [f"model.layers.{i}.mlp.experts" for i in range(2)]


@pytest.mark.parametrize("shares", [2, 4])
def test_balance_loss_of_shares_averages_to_the_whole(shares: int) -> None:
    torch.manual_seed(0)
    logits = [torch.randn(16, 6, requires_grad=True), torch.randn(16, 8, requires_grad=True)]
    whole = balance_loss(logits, 2, lambda counts: counts)
    whole_grads = torch.autograd.grad(whole, logits)

    def global_counts(_: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.topk(2).indices.flatten().bincount(minlength=x.shape[1]).float() for x in logits])

    parts = zip(*(x.chunk(shares) for x in logits), strict=True)
    mean = torch.stack([balance_loss(part, 2, global_counts) for part in parts]).mean()
    torch.testing.assert_close(mean, whole)
    for ours, theirs in zip(torch.autograd.grad(mean, logits), whole_grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_even_load_costs_top_k() -> None:
    even = 5.0 * torch.eye(4).repeat(3, 1)
    torch.testing.assert_close(balance_loss([even], 1, lambda counts: counts), torch.tensor(1.0))
