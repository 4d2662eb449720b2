"""Grouped products of all experts in one call of the C++: numbers, bits, and what is left to the loop."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close
from helpers.threads import torch_threads
from helpers.weights import expert_weights
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.kernels.api import Block
from trimtab.kernels.compiled import CompiledKernels, compiled_kernels
from trimtab.kernels.torch_mm import TorchBackend

SIZES = (3, 0, 70, 1, 9)
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(params=["forward"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Experts of each product that the C++ made."""
    made: list[int] = []
    real = getattr(CompiledKernels, request.param)

    def spy(self: CompiledKernels, fields: Mapping[str, Any]) -> None:
        made.append(fields["E"])
        real(self, fields)

    monkeypatch.setattr(CompiledKernels, request.param, spy)
    return made


gradients = pytest.mark.parametrize("calls", ["weight_gradients"], indirect=True)


def block_of(sizes: tuple[int, ...]) -> Block:
    offsets = torch.tensor((0, *sizes)).cumsum(0)
    return Block(slice(0, len(sizes)), slice(0, sum(sizes)), offsets, sizes)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("widths", [(64, 96), (17, 3), (300, 258)], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, (0, 0), (300,)], ids=str)
def test_products_of_all_experts(
    calls: list[int], sizes: tuple[int, ...], widths: tuple[int, int], turned: bool, threads: int, dtype: torch.dtype
) -> None:
    (deep, wide), rows = widths, sum(sizes)
    x, w = torch.randn(rows, deep).to(dtype), torch.randn(len(sizes), *widths).to(dtype)
    given = w.transpose(1, 2).contiguous().transpose(1, 2) if turned else w
    into = torch.full((rows, wide), torch.nan, dtype=dtype)
    with torch_threads(threads):
        made = compiled_kernels().grouped_mm(x, given, block_of(sizes))
        assert compiled_kernels().grouped_mm(x, given, block_of(sizes), into) is into
    truth = torch.cat([a.double() @ b.double() for a, b in zip(x.split(sizes), w, strict=True)])
    assert_close(made, truth, BOUNDS[dtype], "made")
    assert torch.equal(made, into)
    assert calls == [len(sizes)] * 2


def test_what_does_not_lie_as_it_is_read_goes_the_way_of_the_loop(calls: list[int]) -> None:
    block, kernels = block_of(SIZES), compiled_kernels()
    x, w = torch.randn(sum(SIZES), 64), torch.randn(len(SIZES), 64, 96)
    truth = kernels.grouped_mm(x, w, block)
    assert len(calls) == 1
    into = torch.empty(sum(SIZES), 192)[:, ::2]
    kernels.grouped_mm(x, w, block, into)
    assert_close(into, truth, 2e-6, "strided result")
    wide = torch.randn(sum(SIZES), 128)
    wide[:, ::2] = x
    assert_close(kernels.grouped_mm(wide[:, ::2], w, block), truth, 2e-6, "strided rows")
    assert_close(kernels.grouped_mm(torch._neg_view(-x), w, block), truth, 2e-6, "a sign that is a flag")
    assert_close(kernels.grouped_mm(x, w.double(), block), truth, 2e-6, "weights of another dtype")
    assert_close(kernels.grouped_mm(x.double(), w.double(), block), truth, 2e-6, "float64")
    assert len(calls) == 1
    for rows, result in ((x[:, :-1].contiguous(), None), (x, torch.empty(sum(SIZES), 95))):
        with pytest.raises((RuntimeError, UserWarning)), warnings.catch_warnings(action="error"):
            kernels.grouped_mm(rows, w, block, result)
    assert len(calls) == 1


def test_weights_without_values() -> None:
    block, kernels = block_of(SIZES), compiled_kernels()
    assert kernels.grouped_mm(torch.randn(sum(SIZES), 8), torch.randn(len(SIZES), 8, 0), block).shape == (sum(SIZES), 0)


@gradients
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("widths", [(600, 70), (576, 64), (17, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(64, 0, 100, 1, 41), (300,), (0, 0)], ids=str)
def test_gradients_of_all_experts(
    calls: list[int], sizes: tuple[int, ...], widths: tuple[int, int], add: bool, turned: bool, threads: int
) -> None:
    a, b = (torch.randn(sum(sizes), width) for width in widths)
    shape = (len(sizes), *(widths[::-1] if turned else widths))
    out, block = torch.full(shape, 0.5 if add else torch.nan), block_of(sizes)
    with torch_threads(threads), torch.device("meta"):  # needs no default device
        compiled_kernels().grouped_wgrad(a, b, block, out.transpose(1, 2) if turned else out, add=add)
    assert calls == [len(sizes)]
    truth = gradients_of(a, b, sizes) + (0.5 if add else 0.0)
    assert_close(out.transpose(1, 2) if turned else out, truth, 1e-6, "gradient")


def gradients_of(a: Tensor, b: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.stack([x.double().t() @ y.double() for x, y in zip(a.split(sizes), b.split(sizes), strict=True)])


@gradients
def test_other_gradients_go_the_way_of_the_loop(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    block, kernels, rows, e, A, B = block_of(SIZES), compiled_kernels(), sum(SIZES), len(SIZES), 40, 24
    a, b, out = torch.randn(rows, A), torch.randn(rows, B), torch.empty(e, A, B)
    truth = gradients_of(a, b, SIZES)
    strided = torch.randn(rows, 2 * B)
    strided[:, ::2] = b
    for columns, target in ((strided[:, ::2], out), (b, torch.empty(e, A, 2 * B)[:, :, ::2])):
        kernels.grouped_wgrad(a, columns, block, target)
        assert_close(target, truth, 1e-6, "gradient")
    half = torch.empty(e, A, B, dtype=torch.float16)
    kernels.grouped_wgrad(a, b, block, half)
    assert_close(half, truth, 1e-3, "gradient in another dtype")
    kernels.grouped_wgrad(a[:, :0], b, block, out[:, :0].contiguous())
    refused: list[int] = []
    monkeypatch.setattr(TorchBackend, "grouped_wgrad", lambda self, a, b, *rest, add: refused.append(len(a)))
    for n, wide, deep in ((rows - 1, A, B), (rows, A - 1, B), (rows, A, B + 1)):
        kernels.grouped_wgrad(torch.randn(n, wide), torch.randn(n, deep), block, torch.empty(e, A, B))
    assert len(refused) == 3
    assert not calls


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    """Of an activation of one's own, whether or not experts share a block."""
    torch.manual_seed(0)
    up, down = (torch.randn(*shape).mul_(0.1).to(dtype).requires_grad_() for shape in ((4, 40, 48), (4, 48, 40)))
    x, w, dy = torch.randn(3000, 48).to(dtype), torch.rand(3000, 2), torch.randn(3000, 48).to(dtype)
    ids = torch.rand(3000, 4).topk(2).indices
    found = []
    for rows in (7, 600, 3000):
        leaves = [x[:rows].clone().requires_grad_(), w[:rows].clone().requires_grad_()]
        y = expert_mlp(
            *leaves, plan_experts(ids[:rows], 4), *expert_weights(up=up, down=down), torch.tanh, compiled_kernels()
        )
        y.backward(dy[:rows])
        found.append([t[:7].detach() for t in (y, leaves[0].grad, leaves[1].grad) if t is not None])
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(others, found[0], strict=True))


@pytest.mark.parametrize("stacked", [True, False])
def test_a_grouped_linear_takes_one_call_a_product(calls: list[int], stacked: bool) -> None:
    module = GroupedLinear(5, 24, 40, bias=True, kernels="cpu", dtype=torch.float32, single_parameter=stacked)
    x = torch.randn(sum(SIZES), 24, requires_grad=True)
    module(x, torch.tensor(SIZES))  # with the self-test
    calls.clear()
    y: Tensor = module(x, torch.tensor(SIZES))
    assert calls == ([5] if stacked else [1] * 5)
    y.backward(torch.ones_like(y))
    assert len(calls) == (2 if stacked else 10)
