"""Under `torch.autocast` experts compute in its dtype, as `nn.Linear` does; parameters and gradients keep theirs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from helpers.compile_case import assert_same, inputs
from helpers.layer_case import BOUNDS, build, parted, parted_results, results
from helpers.ranks import run_ranks
from trimtab.experts import on_cpu, product
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import FP8Rowwise

D, F, ROWS = 32, 48, 600
LOW = torch.bfloat16
Run = Callable[[nn.Module, Tensor], Tensor]


def mlp(**options: Any) -> tuple[nn.Module, Run]:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 3, (ROWS, 2), generator=g)  # expert 3 has no token
    w = torch.rand(ROWS, 2, generator=g)
    return ExpertMLP(4, D, F, **options), lambda layer, x: layer(x, ids, w)


def linear(**options: Any) -> tuple[nn.Module, Run]:
    return GroupedLinear(4, D, F, **options), lambda layer, x: layer(x, [ROWS - 40, 0, 37, 1])


def separate(**options: Any) -> tuple[nn.Module, Run]:
    return linear(single_parameter=False, **options)


MADE = pytest.mark.parametrize("make", [mlp, linear, separate])
KERNELS = pytest.mark.parametrize("kernels", ["cpu", "torch", "grouped_mm"])


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", LOW, enabled=enabled)


def tokens() -> Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(5))


def grads(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def assert_near(found: Tensor, true: Tensor, bound: float) -> None:
    assert (found.double() - true.double()).norm() <= bound * true.double().norm()


@MADE
@KERNELS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_products_are_those_of_parameters_in_its_dtype(make: Callable[..., Any], kernels: str, bias: bool) -> None:
    layer, run = make(kernels=kernels, bias=bias)
    low = copy.deepcopy(layer).to(LOW)
    x = tokens().requires_grad_()
    with autocast():
        y = run(layer, x)
    dy = torch.randn_like(y)
    y.backward(dy)
    low_x = x.detach().to(LOW).requires_grad_()
    low_y = run(low, low_x)
    low_y.backward(dy.to(LOW))
    assert y.dtype == x.grad.dtype == torch.float32
    assert torch.equal(y.detach(), low_y.detach().float())
    assert torch.equal(x.grad, low_x.grad.float())
    true = grads(low)
    for name, grad in grads(layer).items():
        assert grad.dtype == torch.float32
        assert_near(grad, true[name], 6e-3)
        exact = kernels == "cpu" and make is mlp and name in ("gate_up", "down")
        assert not exact or not torch.equal(grad, grad.to(LOW).float())  # not rounded to bfloat16


@MADE
def test_float64_keeps_its_own(make: Callable[..., Any]) -> None:
    layer, run = make(dtype=torch.float64)
    x = tokens().double()
    with autocast():
        under = run(layer, x)
    assert torch.equal(under, run(layer, x))


@MADE
def test_a_backward_under_another_autocast_is_the_forwards(make: Callable[..., Any]) -> None:
    layer, run = make()
    found = []
    for forward, backward in ((False, False), (False, True), (True, False), (True, True)):
        layer.zero_grad()
        x = tokens().requires_grad_()
        with autocast(forward):
            y = run(layer, x)
        with autocast(backward):
            y.sum().backward()
        found.append({"x": x.grad, **grads(layer)})
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])
        assert torch.equal(found[2][name], found[3][name])
        assert not torch.equal(found[0][name], found[2][name]) or "bias" in name or not found[0][name].any()


@MADE
@KERNELS
@pytest.mark.parametrize("delay", [False, True])
def test_main_grad_and_delayed_gradients(make: Callable[..., Any], kernels: str, delay: bool) -> None:
    plain, run = make(kernels=kernels)
    other, _ = make(kernels=kernels, main_grad="accumulate", delay_wgrad=delay)
    other.load_state_dict(plain.state_dict())
    x = tokens()
    for p in other.parameters():
        p.main_grad = torch.ones_like(p)
    with autocast():
        run(plain, x).square().sum().backward()
        run(other, x).square().sum().backward()
        other.backward_dw()
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        if "bias" in name:
            assert_near(q.grad, p.grad, 1e-5)
        else:
            assert_near(q.main_grad - 1, p.grad, 1e-4)


@MADE
def test_no_copy_of_a_weight_waits_for_the_backward(make: Callable[..., Any]) -> None:
    layer, run = make(kernels="grouped_mm")
    saved: list[Tensor] = []
    with autocast(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(layer, tokens())
    shapes = {p.shape for p in layer.parameters()}
    kept = [t for t in saved if t.shape in shapes]
    assert kept
    assert all(t.dtype == torch.float32 for t in kept)


@KERNELS
@pytest.mark.parametrize("delay", [False, True])
def test_no_copy_outlives_its_pass(kernels: str, delay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels round as they read, none is made."""
    copies: list[weakref.ref[Tensor]] = []

    def noted(weight: Tensor, *given: Any) -> Tensor:
        made = cast(weight, *given)
        assert made is not weight
        copies.append(weakref.ref(made))
        return made

    cast = product.cast
    for home in (product, on_cpu):
        monkeypatch.setattr(home, "cast", noted)
    layer, run = mlp(kernels=kernels, delay_wgrad=delay)
    x = tokens().requires_grad_()
    with autocast():
        y = run(layer, x)
    for _ in ("forward", "backward"):
        assert bool(copies) == (kernels != "cpu")
        assert all(copy() is None for copy in copies)
        copies.clear()
        if y.grad_fn is not None:
            y.sum().backward(retain_graph=True)
    assert layer.backward_dw() is None


@pytest.mark.parametrize("kernels", ["torch", "grouped_mm"])
@pytest.mark.usefixtures("poisoned")
def test_experts_without_rows_are_not_copied(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    cast = product.cast
    monkeypatch.setattr(product, "cast", lambda *given: runs.append(given[3]) or cast(*given))
    layer, run = mlp(kernels=kernels)
    x = tokens().requires_grad_()
    with autocast():
        y = run(layer, x)
    y.sum().backward()
    assert runs
    assert all(found == [slice(0, 3)] for found in runs)
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))


@pytest.mark.parametrize("make", [mlp, linear])
def test_float16(make: Callable[..., Any]) -> None:
    layer, run = make()
    low = copy.deepcopy(layer).half()
    x = tokens().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        y = run(layer, x)
    y.sum().backward()
    assert torch.equal(y.detach(), run(low, x.detach().half()).detach().float())
    assert all(p.grad.dtype == torch.float32 for p in (x, *layer.parameters()))


@pytest.mark.parametrize("make", [mlp, linear])
def test_shapes_alone(make: Callable[..., Any]) -> None:
    with FakeTensorMode(), autocast():
        layer, run = make()
        x = torch.randn(ROWS, D, requires_grad=True)
        y = run(layer, x)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == torch.float32
        assert all(p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize("make", [mlp, linear])
def test_a_recipe_quantises_what_autocast_makes(make: Callable[..., Any]) -> None:
    layer, run = make(recipe=FP8Rowwise(backend="emulated"))
    low = copy.deepcopy(layer).to(LOW)
    x = tokens().requires_grad_()
    with autocast():
        y = run(layer, x)
    y.sum().backward()
    assert torch.equal(y.detach(), run(low, x.detach().to(LOW)).detach().float())
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_has_the_numbers_of_an_eager_one(backend: str) -> None:
    moe = build(shared_hidden=6, bias=True)
    run = torch.compile(moe, backend=backend, fullgraph=True)
    for enabled in (True, False, True):  # a graph for each
        given = inputs((9,), torch.float32)
        with autocast(enabled):
            eager = results(moe, moe, given)
            ours = results(run, moe, given)
        assert_same(ours, eager, BOUNDS[torch.float32] if not enabled else 1e-2)


def over_ranks() -> list[str]:
    """Experts on two ranks, against the whole layer on each; the dtypes of what was sent."""
    whole, moe, sent = build(shared_hidden=6), parted(build(shared_hidden=6)), []
    moe.experts.register_forward_pre_hook(lambda _, given: sent.append(str(given[0].dtype)))
    for count in ((7, 5), (0, 9), (0, 0)):
        given = inputs((count[dist.get_rank()],), torch.float32, masked=True)
        with autocast():
            ours, alone = results(moe, moe, given), results(whole, whole, given)
        assert_same(ours, parted_results(alone), 2e-2)
    results(moe, moe, inputs((3,), torch.float32))
    return sent


def test_an_exchange_moves_tokens_in_its_dtype() -> None:
    for sent in run_ranks(over_ranks, 2, deadline=200.0):
        assert sent == ["torch.bfloat16"] * 3 + ["torch.float32"]
