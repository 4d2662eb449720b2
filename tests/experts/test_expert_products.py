"""The expert MLP's two ways through its rows: block by block, and all at once as a recipe needs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experts.test_expert_mlp import CPU, E, T, route, tensors
from helpers.comparing import assert_close
from helpers.weights import expert_weights
from trimtab.errors import ConfigError
from trimtab.experts.grad_sink import GradSink
from trimtab.experts.low_precision import LowPrecisionProducts
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import ExpertPlan, plan_experts
from trimtab.experts.recipes import RecipeState
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import get_backend


class Plain(RecipeState):
    """Does not quantise."""

    def activation(self, x_RA: Tensor, offsets_e: Tensor, along: str) -> Tensor:
        return x_RA

    def weight(self, w_eAB: Tensor, along: str) -> Tensor:
        return w_eAB

    gradient = activation


def unquantised(kernels: Backend, plan: ExpertPlan) -> tuple[LowPrecisionProducts, LowPrecisionProducts]:
    return tuple(LowPrecisionProducts(kernels, plan.offsets_e, Plain(), None) for _ in range(2))


def test_what_does_not_go_together_is_refused() -> None:
    x, w, up, down = tensors()
    plan, kernels, norm = plan_experts(route("random", T), E), get_backend("torch", CPU), torch.sin
    plain, own = expert_weights(up=up, down=down), "take no function of one's own"
    with pytest.raises(ConfigError, match=own):
        expert_mlp(x, w, plan, *plain, "swiglu", kernels, norm=norm, sink=GradSink(defer=lambda job, reads: None))
    low = unquantised(kernels, plan)
    turned = expert_weights(up=up.mT, down=down.mT, transposed=True)
    with pytest.raises(ConfigError, match=own):
        expert_mlp(x, w, plan, *plain, norm, kernels, low_precision=low)
    with pytest.raises(ConfigError, match="takes no transposed weights"):
        expert_mlp(x, w, plan, *turned, "swiglu", kernels, low_precision=low)


def test_products_that_do_not_quantise_give_the_same_numbers() -> None:
    """The whole-rows path against the block-by-block one."""
    plan, kernels = plan_experts(route("dropped", T), E), get_backend("torch", CPU)
    found = []
    for given in (None, unquantised(kernels, plan)):
        args = tensors(torch.float64)
        weights = expert_weights(up=args[2], down=args[3])
        y = expert_mlp(*args[:2], plan, *weights, "swiglu", kernels, low_precision=given)
        found.append([y, *torch.autograd.grad(y.square().sum(), args)])
    for name, a, b in zip(("y", "x", "w", "up", "down"), *found, strict=True):
        assert_close(a, b, 1e-12, name)
