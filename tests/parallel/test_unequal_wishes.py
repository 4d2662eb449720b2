"""Ranks that want other gradients than their peers, as one without tokens may: the backward is one of all ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.comparing import relative_error
from helpers.layout_truth import spread
from helpers.ranks import run_ranks
from trimtab import MoEConfig, RouterConfig

D = 16
TRAINED = {"the experts": ("experts.",), "nothing": (), "the router": ("router.",)}


def gradients(
    etp: bool, trained: tuple[str, ...], tokens: int, wants: bool, replicate_experts: Any
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    router = RouterConfig(num_experts=4, top_k=2)
    moe = MoEConfig(dim=D, hidden=8, router=router, bias=True, latent_dim=12, dtype=torch.float64).build("moe")
    spread(moe, "", etp, replicate_experts=replicate_experts, copy_cost=0)
    for name, p in moe.named_parameters():
        p.requires_grad_(name.startswith(trained) if trained else False)
    torch.manual_seed(1 + torch.distributed.get_rank())
    x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=wants)
    for _ in range(2):  # and the ranks meet again
        moe(x).y.square().sum().backward()
    found = {name: p.grad for name, p in (*moe.named_parameters(), ("x", x)) if p.grad is not None}
    return {name: getattr(t, "_local_tensor", t).clone() for name, t in found.items()}


def on_rank(replicate_experts: Any) -> dict[str, float]:
    rank, gaps = torch.distributed.get_rank(), {}
    for etp, (what, trained) in product((False, True), TRAINED.items()):
        mine = 7 if rank == 0 else 5 if what == "nothing" else 0
        truth = gradients(etp, trained, mine, True, replicate_experts)
        found = gradients(etp, trained, mine, rank == 0, replicate_experts)
        assert truth.keys() - found.keys() == (set() if rank == 0 else {"x"})
        errors = [relative_error(found[name], truth[name]) for name in found if truth[name].numel()]
        gaps[f"etp {etp}, {what}"] = max(errors, default=0.0)
    return gaps


@pytest.mark.parametrize("replicate_experts", ["off", 0.0])
def test_it_has_the_gradients_that_it_wants_and_so_have_the_others(replicate_experts: Any) -> None:
    for gaps in run_ranks(on_rank, 2, replicate_experts, deadline=60.0):
        assert len(gaps) == 6
        assert max(gaps.values()) < 1e-12, gaps
