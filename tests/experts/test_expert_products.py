"""The expert MLP's two ways through its rows: block by block, and all at once as a recipe needs it."""

from __future__ import annotations

import pytest
import torch

from experts.test_expert_mlp import CPU, E, T, route, tensors
from helpers.comparing import assert_close
from trimtab.errors import ConfigError
from trimtab.experts.activations import SwiGLU
from trimtab.experts.expert_call import TwoProducts
from trimtab.experts.mlp import ExpertMath, ExpertWeights, expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.experts.products import Products
from trimtab.experts.recomputed import Recomputed
from trimtab.kernels.grouped import get_kernels


def test_what_does_not_go_together_is_refused() -> None:
    x, w, up, down = tensors()
    plan, kernels, norm = plan_experts(route("random", T), E), get_kernels("loop", CPU), Recomputed(torch.sin)
    with pytest.raises(ConfigError, match="cannot be delayed where a norm follows"):
        expert_mlp(
            x, w, plan, ExpertWeights(up=up, down=down), ExpertMath(post_norm=norm), kernels, defer=lambda job: None
        )
    products = TwoProducts(*(Products(kernels, plan.offsets_e) for _ in range(2)))
    turned = ExpertWeights(up=up.mT, down=down.mT, transposed=True)
    for weights, math in (
        (ExpertWeights(up=up, down=down), ExpertMath(post_norm=norm)),
        (turned, ExpertMath()),
        (ExpertWeights(up=up, down=down), ExpertMath(activation=Recomputed(SwiGLU().forward, torch.nn.RMSNorm(2)))),
    ):
        with pytest.raises(ConfigError, match="a recipe takes no norm"):
            expert_mlp(x, w, plan, weights, math, kernels, products=products)


def test_products_that_do_not_quantise_give_the_same_numbers() -> None:
    """The whole-rows path against the block-by-block one."""
    plan, kernels = plan_experts(route("dropped", T), E), get_kernels("loop", CPU)
    products = TwoProducts(*(Products(kernels, plan.offsets_e) for _ in range(2)))
    for weights in ("experts", "combine"):
        found = []
        for given in (None, products):
            args = tensors(torch.float64)
            y = expert_mlp(
                *args[:2], plan, ExpertWeights(up=args[2], down=args[3]), ExpertMath(weights=weights), kernels,
                products=given,
            )  # fmt: skip
            found.append([y, *torch.autograd.grad(y.square().sum(), args)])
        for name, a, b in zip(("y", "x", "w", "up", "down"), *found, strict=True):
            assert_close(a, b, 1e-12, f"{weights}: {name}")
