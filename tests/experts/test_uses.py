"""Expert layers used as any module of torch may be: parameters swapped, frozen in between, buffers used again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from trimtab.errors import InputError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP

SIZES = [3, 0, 5]


def linear(**options: Any) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    return GroupedLinear(3, 8, 8, **options), lambda layer, x: layer(x, SIZES)


def experts(**options: Any) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    ids = torch.arange(16).view(8, 2) % 3
    return ExpertMLP(4, 8, 8, bias=True, **options), lambda layer, x: layer(x, ids, torch.ones(8, 2))


BOTH = pytest.mark.parametrize("make", [linear, experts])


@BOTH
@pytest.mark.parametrize("kernels", ["auto", "torch", "grouped_mm"])
def test_other_tensors_take_the_parameters_place(make: Callable[..., Any], kernels: str) -> None:
    layer, run = make(kernels=kernels)
    x = torch.randn(8, 8)
    other = {name: torch.randn_like(p).requires_grad_() for name, p in layer.named_parameters()}
    call = nn.Module()
    call.layer, call.forward = layer, lambda x: run(layer, x)
    y = torch.func.functional_call(call, {f"layer.{name}": t for name, t in other.items()}, (x,))
    found = torch.autograd.grad(y.square().sum(), list(other.values()))
    layer.load_state_dict({name: t.detach() for name, t in other.items()})
    wanted = run(layer, x)
    assert torch.equal(y, wanted)
    for got, true in zip(found, torch.autograd.grad(wanted.square().sum(), list(layer.parameters())), strict=True):
        assert torch.equal(got, true)


@BOTH
def test_a_parametrized_weight(make: Callable[..., Any]) -> None:
    layer, run = make()
    x = torch.randn(8, 8)
    plain = run(layer, x)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight" if make is linear else "gate_up")
    y = run(layer, x)
    torch.testing.assert_close(y, plain)
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@BOTH
@pytest.mark.parametrize("delayed", [False, True])
def test_what_was_frozen_in_the_forward_gets_no_gradient(make: Callable[..., Any], delayed: bool) -> None:
    layer, run = make(delay_wgrad=delayed)
    x = torch.randn(8, 8, requires_grad=True)
    layer.requires_grad_(False)
    y = run(layer, x)
    layer.requires_grad_(True)
    y.square().sum().backward()
    layer.backward_dw()
    assert x.grad is not None
    assert all(p.grad is None for p in layer.parameters())


@BOTH
def test_what_is_frozen_after_the_backward_gets_no_delayed_gradient(make: Callable[..., Any]) -> None:
    layer, run = make(delay_wgrad=True)
    run(layer, torch.randn(8, 8)).square().sum().backward()
    first, *others = layer.parameters()
    first.requires_grad_(False)
    layer.backward_dw()
    assert first.grad is None
    assert all(p.grad is not None for p in others)


@BOTH
@pytest.mark.parametrize("kernels", ["auto", "torch", "grouped_mm"])
def test_a_buffer_that_is_used_again_too_early_is_named(make: Callable[..., Any], kernels: str) -> None:
    layer, run = make(delay_wgrad=True, kernels=kernels)
    buffer = torch.randn(8, 8)
    for early in (False, True):
        run(layer, buffer).square().sum().backward()
        if early:
            buffer.zero_()
            with pytest.raises(InputError, match=r"\(8, 8\).*changed in place"):
                layer.backward_dw()
        else:
            layer.backward_dw()
            buffer.zero_()


@BOTH
def test_what_delayed_work_does_not_read_may_be_used_again(make: Callable[..., Any]) -> None:
    layer, run = make(delay_wgrad=True)
    first, *others = layer.parameters()
    for param in [first, *others] if make is linear else [first]:  # of experts the bias of down needs no x
        param.requires_grad_(False)
    if make is experts:
        layer.gate_up_bias.requires_grad_(False)
    x, dy = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    run(layer, x).backward(dy)
    with torch.no_grad():
        x.zero_()
    if make is linear:
        dy.zero_()
    layer.backward_dw()


@BOTH
def test_a_copy_has_no_part_in_delayed_work(make: Callable[..., Any]) -> None:
    layer, run = make(delay_wgrad=True)
    run(layer, torch.randn(8, 8)).sum().backward()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(InputError, match="without a backward"):
            other.backward_dw()
    layer.backward_dw()
    assert all(p.grad is not None for p in layer.parameters())


@BOTH
def test_delayed_work_takes_inference_tensors_and_no_autocast(make: Callable[..., Any]) -> None:
    layer, run = make(delay_wgrad=True)
    layer.to(torch.float16)
    x = torch.randn(8, 8, dtype=torch.float16)
    with torch.inference_mode():
        dy = torch.randn(8, 8, dtype=torch.float16)
    found = []
    for autocast in (False, True):
        layer.zero_grad()
        run(layer, x).backward(dy)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            layer.backward_dw()
        found.append([p.grad.clone() for p in layer.parameters()])
    for plain, under in zip(*found, strict=True):
        assert torch.equal(plain, under)


@pytest.mark.parametrize("delayed", [False, True])
def test_one_weight_in_two_groups_gets_the_sum(delayed: bool) -> None:
    layer = GroupedLinear(3, 8, 8, bias=False, single_parameter=False, delay_wgrad=delayed)
    layer.weight2 = layer.weight0
    x = torch.randn(8, 8)
    layer(x, SIZES).square().sum().backward()
    layer.backward_dw()
    plain = layer.weight0.detach().clone().requires_grad_()
    (x @ plain.t()).square().sum().backward()  # its groups have all rows
    assert plain.grad is not None
    torch.testing.assert_close(layer.weight0.grad, plain.grad)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_group_that_was_frozen_in_the_forward_has_no_main_grad_written(delayed: bool) -> None:
    layer = GroupedLinear(3, 8, 8, single_parameter=False, main_grad="accumulate", delay_wgrad=delayed)
    for i, param in enumerate(layer.weights):
        if i != 2:
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
    layer.weight0.requires_grad_(False)
    layer.weight2.requires_grad_(False)
    y = layer(torch.randn(8, 8), [3, 3, 2])
    layer.requires_grad_(True)
    y.square().sum().backward()
    layer.backward_dw()
    assert not layer.weight0.main_grad.any()
    assert layer.weight1.main_grad.any()
    assert not hasattr(layer.weight0, "grad_added_to_main_grad")


def test_a_compiled_linear_is_part_of_the_graph() -> None:
    layer, x = GroupedLinear(4, 256, 512), torch.randn(900, 256, requires_grad=True)
    sizes = [200, 300, 0, 400]
    true = torch.autograd.grad((2 * layer(x, sizes)).square().sum(), [x, *layer.parameters()])
    counted = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda x: 2 * layer(x + 0, sizes), backend=counted, fullgraph=True)
    for got, want in zip(torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()]), true, strict=True):
        torch.testing.assert_close(got, want)
    assert counted.frame_count == 1


@BOTH
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vmap])
def test_transforms_are_refused_by_name(make: Callable[..., Any], transform: Callable[..., Any]) -> None:
    layer, run = make()
    x = torch.randn(2, 8, 8) if transform is torch.func.vmap else torch.randn(8, 8)
    with pytest.raises(InputError, match=r"torch\.func"):
        transform(lambda x: run(layer, x).sum())(x)
