"""Every backward of ours: differentiated twice it raises, and a caller's autocast does not reach it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.layer import MoE, MoEConfig
from trimtab.routing.config import RouterConfig


def experts(kernels: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layer, ids = ExpertMLP(4, 16, 8, kernels=kernels), torch.arange(20).view(10, 2) % 4
    return layer, lambda x: layer(x, ids, torch.ones(10, 2))


def linear(kernels: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layer = GroupedLinear(3, 16, 8, kernels=kernels)
    return layer, lambda x: layer(x, [4, 0, 6])


def moe(kernels: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    router = RouterConfig(num_experts=4, top_k=2, aux_loss=0.01, z_loss=0.001)
    layer: MoE = MoEConfig(dim=16, hidden=8, router=router, kernels=kernels).build()

    def run(x: Tensor) -> Tensor:
        out = layer(x)
        return out.y + sum(out.losses.values())

    return layer, run


LAYERS = (experts, linear, moe)


@pytest.mark.parametrize("kernels", ["auto", "loop", "stock"])
@pytest.mark.parametrize("make", LAYERS)
def test_a_penalty_on_gradients_raises(make: Callable[..., object], kernels: str) -> None:
    layer, run = make(kernels)  # type: ignore[misc]
    x = torch.randn(10, 16, requires_grad=True)
    y = run(x).sum()  # the gradient of a sum has no graph of its own
    found = torch.autograd.grad(y, [x, *layer.parameters()], create_graph=True)
    for grad in found[:2]:
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            (y + grad.square().sum()).backward(retain_graph=True)
    plain = torch.autograd.grad(run(x).sum(), [x, *layer.parameters()])
    for got, true in zip(found, plain, strict=True):
        assert torch.equal(got.detach(), true)


@pytest.mark.parametrize("kernels", ["auto", "loop", "stock"])
@pytest.mark.parametrize("make", LAYERS)
def test_a_backward_under_autocast_has_the_bits_of_one_without(make: Callable[..., object], kernels: str) -> None:
    layer, run = make(kernels)  # type: ignore[misc]
    x = torch.randn(10, 16, requires_grad=True)
    given = torch.randn(run(x).shape)
    plain = torch.autograd.grad(run(x), [x, *layer.parameters()], given)
    y = run(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, [x, *layer.parameters()], given)
    for got, true in zip(found, plain, strict=True):
        assert torch.equal(got, true)
