"""The expert MLP's two ways through its rows: block by block, and all at once as a recipe needs it."""

from __future__ import annotations

import pytest
import torch

from experts.test_expert_mlp import CPU, E, T, route, tensors
from helpers.comparing import assert_close
from trimtab.errors import ConfigError
from trimtab.experts.expert_call import TwoProducts
from trimtab.experts.mlp import ExpertWeights, expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.experts.products import Products
from trimtab.kernels.choose import get_backend


def test_what_does_not_go_together_is_refused() -> None:
    x, w, up, down = tensors()
    plan, kernels, norm = plan_experts(route("random", T), E), get_backend("torch", CPU), torch.sin
    plain, own = ExpertWeights(up=up, down=down), "take no function of one's own"
    with pytest.raises(ConfigError, match=own):
        expert_mlp(x, w, plan, plain, "swiglu", kernels, norm=norm, defer=lambda job, reads: None)
    products = TwoProducts(*(Products(kernels, plan.offsets_e) for _ in range(2)))
    turned = ExpertWeights(up=up.mT, down=down.mT, transposed=True)
    with pytest.raises(ConfigError, match=own):
        expert_mlp(x, w, plan, plain, norm, kernels, products=products)
    with pytest.raises(ConfigError, match="takes no transposed weights"):
        expert_mlp(x, w, plan, turned, "swiglu", kernels, products=products)


def test_products_that_do_not_quantise_give_the_same_numbers() -> None:
    """The whole-rows path against the block-by-block one."""
    plan, kernels = plan_experts(route("dropped", T), E), get_backend("torch", CPU)
    products = TwoProducts(*(Products(kernels, plan.offsets_e) for _ in range(2)))
    found = []
    for given in (None, products):
        args = tensors(torch.float64)
        weights = ExpertWeights(up=args[2], down=args[3])
        y = expert_mlp(*args[:2], plan, weights, "swiglu", kernels, products=given)
        found.append([y, *torch.autograd.grad(y.square().sum(), args)])
    for name, a, b in zip(("y", "x", "w", "up", "down"), *found, strict=True):
        assert_close(a, b, 1e-12, name)
