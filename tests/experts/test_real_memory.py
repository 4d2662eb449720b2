"""Kernels that read addresses get what lies there: views, promises and saved tensors that came back otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from helpers.wrapped import Outside, Quantised
from trimtab.errors import ConfigError, InputError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.plan import plan_experts

M, K, D, F, E = 12, 2, 16, 24, 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KERNELS = pytest.mark.parametrize("kernels", ["auto", "torch"])


@pytest.fixture
def no_graph_stays() -> Iterator[None]:
    """What was compiled would be found by others."""
    yield
    torch._dynamo.reset()


def inputs(dtype: torch.dtype, kernels: str, bias: bool = True) -> tuple[ExpertMLP, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    mlp = ExpertMLP(E, D, F, bias=bias, dtype=dtype, kernels=kernels)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(M)])
    return mlp, torch.randn(M, D).to(dtype), ids, torch.rand(M, K), torch.randn(M, D).to(dtype)


def results(mlp: ExpertMLP, x: Tensor, ids: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    mlp.zero_grad()
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = mlp(x, ids, w)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in (x, w, *mlp.parameters()) if t.grad is not None)]


def same(found: list[Tensor], truth: list[Tensor]) -> None:
    assert len(found) == len(truth) == 7
    for one, true in zip(found, truth, strict=True):
        torch.testing.assert_close(one, true)


@DTYPES
@KERNELS
@pytest.mark.parametrize("which", [1, 3, 4])
def test_a_sign_that_was_not_taken_yet(which: int, dtype: torch.dtype, kernels: str) -> None:
    given: list[Any] = list(inputs(dtype, kernels))
    truth = results(*given)
    given[which] = torch._neg_view(-given[which])
    assert given[which].is_neg()
    same(results(*given), truth)


@DTYPES
@KERNELS
def test_a_gradient_that_only_says_that_it_is_zero(dtype: torch.dtype, kernels: str) -> None:
    *given, dy = inputs(dtype, kernels)
    truth = results(*given, torch.zeros_like(dy))
    same(results(*given, torch._efficientzerotensor(M, D, dtype=dtype)), truth)


@DTYPES
def test_what_a_collective_is_still_bringing(dtype: torch.dtype) -> None:
    mlp, x, ids, w, dy = inputs(dtype, "auto")
    truth = results(mlp, x, ids, w, dy)
    mlp.zero_grad()
    y = mlp(AsyncCollectiveTensor(x), ids, w)
    y.backward(dy)
    torch.testing.assert_close(y.detach(), truth[0])
    for p, true in zip(mlp.parameters(), truth[3:], strict=True):
        torch.testing.assert_close(p.grad, true)


UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": lambda t: t.mT.contiguous().mT if t.dim() == 2 else t,
    "part of a buffer": lambda t: torch.nn.functional.pad(t, (0, 8), value=9.0)[..., : t.shape[-1]],
    "wider": lambda t: t.double() if t.is_floating_point() else t,
    "narrower": lambda t: t.bfloat16() if t.is_floating_point() else t,
}


@DTYPES
@pytest.mark.parametrize(  # torch's own products, which the loop makes, refuse another dtype
    ("kernels", "way"), [*(("auto", way) for way in UNPACK), ("torch", "strides"), ("torch", "part of a buffer")]
)
def test_saved_tensors_may_come_back_otherwise(kernels: str, way: str, dtype: torch.dtype) -> None:
    mlp, x, ids, w, dy = inputs(dtype, kernels)
    truth = results(mlp, x, ids, w, dy)
    with saved_tensors_hooks(lambda t: t.detach().clone(), UNPACK[way]):
        found = results(mlp, x, ids, w, dy)
    for one, true in zip(found, truth, strict=True):
        assert (one - true).norm() <= 0.02 * true.norm()


@DTYPES
def test_saved_tensors_that_came_back_short_are_refused(dtype: torch.dtype) -> None:
    mlp, x, ids, w, dy = inputs(dtype, "auto")
    with saved_tensors_hooks(lambda t: t, lambda t: t[:-1] if t.shape == (M * K, 2 * F) else t):
        y = mlp(x.requires_grad_(), ids, w)
    with pytest.raises(InputError, match="the pre-activations came back as"):
        y.backward(dy)


@DTYPES
def test_rows_and_weights_in_other_tensors_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    mlp, x, ids, w, _ = inputs(dtype, "auto", bias=False)
    truth = mlp(x, ids, w).detach()
    assert torch.equal(mlp(Outside(x), ids, w), truth)
    for name in ("gate_up", "down"):
        setattr(mlp, name, torch.nn.Parameter(Outside(getattr(mlp, name).detach()), requires_grad=False))
    found = mlp(x, ids, w)
    assert (found - truth).norm() <= (1e-6 if dtype == torch.float32 else 0.02) * truth.norm()


@pytest.mark.usefixtures("no_graph_stays")
@DTYPES
@pytest.mark.parametrize("name", ["gate_up", "down", "gate_up_bias", "down_bias"])
def test_quantized_parameters_are_refused_by_name_and_those_on_the_way_awaited(name: str, dtype: torch.dtype) -> None:
    mlp, x, ids, w, _ = inputs(dtype, "auto")
    truth, param = mlp(x, ids, w).detach(), getattr(mlp, name).detach()
    setattr(mlp, name, torch.nn.Parameter(AsyncCollectiveTensor(param), requires_grad=False))
    assert (mlp(x, ids, w) - truth).norm() <= (1e-6 if dtype == torch.float32 else 0.02) * truth.norm()
    setattr(mlp, name, torch.nn.Parameter(Quantised(param), requires_grad=False))
    says = rf"phase experts\] %s has a parameter of .* in a Quantised of {dtype}: keep parameters in"
    for run in (mlp, torch.compile(mlp, backend="eager")):
        with pytest.raises(ConfigError, match=says % "ExpertMLP"):
            run(x, ids, w)
    linear = GroupedLinear(2, D, D, dtype=dtype)
    kind = "bias" if "bias" in name else "weight"
    setattr(linear, kind, torch.nn.Parameter(Quantised(getattr(linear, kind).detach()), requires_grad=False))
    with pytest.raises(ConfigError, match=says % "GroupedLinear"):
        linear(x, [5, M - 5])


def test_a_plan_of_other_rows_is_refused() -> None:
    mlp, x, ids, w, _ = inputs(torch.float32, "auto")
    kernels = mlp.kernels.on(x.device, x.dtype)
    plan = plan_experts(ids.repeat(5, 1), E, kernels=kernels)
    with pytest.raises(InputError, match="do not fit together"):
        expert_mlp(x, w, plan, *mlp.expert_weights(), "swiglu", kernels)


@pytest.mark.parametrize("grouped", [False, True])
def test_batched_gradients_and_traces_are_refused(grouped: bool) -> None:
    mlp, x, ids, w, _ = inputs(torch.float32, "auto")
    linear = GroupedLinear(2, D, D)

    def run(rows: Tensor) -> Tensor:
        y: Tensor = linear(rows, torch.tensor([5, M - 5])) if grouped else mlp(rows, ids, w)
        return y

    x.requires_grad_()
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.grad(run(x), x, torch.randn(3, M, D), is_grads_batched=True)
    with pytest.raises(InputError, match=r"torch\.jit"):
        torch.jit.trace(run, x)
