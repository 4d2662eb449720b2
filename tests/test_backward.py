"""Every backward of ours: differentiated twice it raises, and autocast around it does not reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trimtab.autograd import once_differentiable
from trimtab.errors import InputError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.moe import MoE, MoEConfig
from trimtab.routing.config import RouterConfig


def experts(kernels: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layer, ids = ExpertMLP(4, 16, 8, kernels=kernels), torch.arange(20).view(10, 2) % 4
    return layer, lambda x: layer(x, ids, torch.ones(10, 2, dtype=x.dtype))


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


class Operators(TorchDispatchMode):
    """The names of those that run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernels", ["auto", "torch", "grouped_mm"])
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


@pytest.mark.parametrize("kernels", ["auto", "torch", "grouped_mm"])
@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_so_does_one_on_which_only_some_tensor_is_asked_for(
    make: Callable[..., object], kernels: str, checkpointed: bool
) -> None:
    """As by `torch.autograd.functional.hessian`: the engine runs what lies between the two alone."""
    layer, run = make(kernels)  # type: ignore[misc]
    before, x = nn.Linear(16, 16), torch.randn(10, 16, requires_grad=True)
    for asked in (x, before.weight, *layer.parameters()):
        h = before(x)
        y = checkpoint(run, h, use_reentrant=False) if checkpointed else run(h)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            torch.autograd.grad(grad.square().sum(), asked, retain_graph=True)
    bystander = torch.ones(16, requires_grad=True)
    (found,) = torch.autograd.grad((grad + bystander).sum(), bystander)
    assert torch.equal(found, torch.full((16,), 10.0))


@pytest.mark.parametrize("kernels", ["auto", "torch", "grouped_mm"])
@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("forward", [False, True])
def test_autocast_around_a_backward_changes_no_bit(make: Callable[..., object], kernels: str, forward: bool) -> None:
    layer, run = make(kernels)  # type: ignore[misc]
    dtype = torch.float32 if make is moe else torch.float16  # on the CPU autocast widens products of float16
    layer.to(dtype)
    x = torch.randn(10, 16, dtype=dtype, requires_grad=True)
    given = torch.randn_like(run(x))
    found = []
    for backward in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            y = run(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            found.append(torch.autograd.grad(y, [x, *layer.parameters()], given))
    for plain, under in zip(*found, strict=True):
        assert torch.equal(plain, under)


def test_autocast_reaches_no_backward() -> None:
    class Seen(Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @once_differentiable
        def backward(ctx: object, d: Tensor) -> Tensor:
            assert not torch.is_autocast_enabled("cpu")
            return d

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        Seen.apply(x).sum().backward()  # type: ignore[no-untyped-call]
        assert torch.is_autocast_enabled("cpu")
    assert x.grad is not None


@pytest.mark.parametrize("kernels", ["auto", "torch", "grouped_mm"])
@pytest.mark.parametrize("make", LAYERS)
def test_a_forward_without_gradients_has_its_bits_and_no_tangents(make: Callable[..., object], kernels: str) -> None:
    _, run = make(kernels)  # type: ignore[misc]
    x = torch.randn(10, 16)
    true = run(x)
    with torch.no_grad():
        found = run(x)
        assert not found.requires_grad
        assert torch.equal(found, true.detach())
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(InputError, match="forward-mode AD"):
                run(dual)


def test_tokens_that_are_all_real_cost_no_operators_of_a_mask() -> None:
    layer = MoEConfig(dim=16, hidden=8, router=RouterConfig(num_experts=4, top_k=2)).build().eval()
    x, real = torch.randn(1, 1, 16), torch.ones(1, 1, dtype=torch.bool)
    with torch.no_grad():
        layer(x)
        with Operators() as plain:
            without = layer(x)
        with Operators() as masked:
            with_mask = layer(x, token_mask=real)
    for name in ("y", "loads_E", "ids_TK"):
        assert torch.equal(getattr(without, name), getattr(with_mask, name)), name
    assert {"aten::bitwise_not", "aten::masked_fill", "aten::isfinite"}.isdisjoint(plain.names)
    assert "aten::masked_fill" in masked.names
