"""The grouped linear map as a function: against float64, and as operators in graphs and without values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from helpers.comparing import assert_close
from helpers.linear_truth import true_results
from helpers.pairs import BOUNDS
from trimtab.experts.grouped_linear import grouped_linear
from trimtab.kernels.choose import KernelChoice

A, B, TAIL = 16, 24, 2
KERNELS = ("torch", "grouped_mm", "auto")
SIZES = ([3, 0, 4], [0, 0, 0], [0, 5, 1], [7])


def operands(sizes: list[int], dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, weight, bias, offsets), rows behind the last segment of NaN."""
    g = torch.Generator().manual_seed(len(sizes))
    shape = (A, B) if transposed else (B, A)
    x, w, b = (torch.randn(s, generator=g) for s in ((sum(sizes) + TAIL, A), (len(sizes), *shape), (len(sizes), B)))
    x[sum(sizes) :] = torch.nan
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return *(t.to(dtype).requires_grad_() for t in (x, w, b)), offsets  # type: ignore[return-value]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients(kernels: str, dtype: torch.dtype) -> None:
    chosen = KernelChoice(kernels).on(torch.device("cpu"), dtype)
    for sizes, transposed, has_bias in product(SIZES, (False, True), (False, True)):
        x, w, b, offsets = operands(sizes, dtype, transposed)
        y = grouped_linear(x, w, offsets, b if has_bias else None, transposed=transposed, kernels=chosen)
        dy = torch.randn(y.shape).to(dtype)
        dy[sum(sizes) :] = torch.nan
        y.backward(dy)
        turned = w.mT if transposed else w
        truth = true_results(x, turned.detach(), b if has_bias else None, dy, sizes)
        dw = w.grad.mT if transposed else w.grad
        for got, true in ((y, truth.y), (x.grad, truth.dx), (dw, torch.stack(truth.dw))):
            assert_close(got, true, BOUNDS[dtype], f"{sizes}, transposed {transposed}")
        if has_bias:
            assert_close(b.grad, torch.stack(truth.db), BOUNDS[dtype], "bias")


def run(x: Tensor, w: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return grouped_linear(x, w, offsets, b, kernels="torch")


def results(call: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in args[:3]]
    y = call(*leaves, args[3])
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in leaves)]


def test_a_graph_has_the_same_operators_and_bits() -> None:
    args = operands([3, 0, 4], torch.float32, False)
    args = (args[0].detach().nan_to_num(), *args[1:])
    eager = results(run, *args)
    compiled = results(torch.compile(run, fullgraph=True, backend="aot_eager"), *args)
    assert all(torch.equal(*pair) for pair in zip(eager, compiled, strict=True))
    module = torch.nn.Module()
    module.forward = run
    exported = torch.export.export(module, tuple(t.detach() for t in args))
    assert [n.target for n in exported.graph.nodes if n.op == "call_function"] == [
        torch.ops.trimtab.grouped_linear.default
    ]


def test_shapes_and_flops_without_values() -> None:
    args = operands([3, 0, 4], torch.float32, False)
    counted = []
    for device in ("cpu", "meta"):
        with FlopCounterMode(display=False) as counter:
            y, *grads = results(run, *(t.to(device) for t in args))
        assert (y.shape, [g.shape for g in grads]) == ((9, B), [t.shape for t in args[:3]])
        counted.append(counter.get_total_flops())
    assert counted == [3 * 2 * 9 * A * B] * 2


def test_differentiating_twice_is_refused() -> None:
    x, w, b, offsets = operands([3, 0, 4], torch.float32, False)
    (dx,) = torch.autograd.grad(run(x, w, b, offsets).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
