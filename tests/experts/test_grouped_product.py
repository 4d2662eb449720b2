"""One grouped product as a function: operators in graphs and without values, what it keeps; the grid has numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from helpers.comparing import assert_close
from trimtab.experts.grouped_product import grouped_product
from trimtab.experts.plan import plan_experts
from trimtab.experts.weight import GroupedWeight, LoraFactors

A, B, RANK, SIZES, TAIL = 16, 24, 8, [3, 0, 4], 2


def operands() -> list[Tensor]:
    """Rows, values, biases, a and b."""
    g, e = torch.Generator().manual_seed(0), len(SIZES)
    shapes = ((sum(SIZES) + TAIL, A), (e, B, A), (e, B), (e, RANK, A), (e, B, RANK))
    return [torch.randn(shape, generator=g) for shape in shapes]


OFFSETS = torch.tensor([0, *SIZES]).cumsum(0)


def run(x: Tensor, w: Tensor, bias: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
    weight = GroupedWeight(values=(w,), biases=(bias,), lora=LoraFactors(a=a, b=b, scale=0.5))
    return grouped_product(x, weight, options.pop("offsets", OFFSETS).to(x.device), kernels="torch", **options)


def results(call: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    y = call(*leaves)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None)]


def test_a_graph_has_the_same_operators_and_bits() -> None:
    given = operands()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(*pair) for pair in zip(results(run, given), results(compiled, given), strict=True))
    module = torch.nn.Module()
    module.forward = run
    exported = torch.export.export(module, tuple(given))
    targets = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
    assert "trimtab.grouped_product.default" in targets


def test_shapes_and_flops_without_values() -> None:
    counted, rows = [], sum(SIZES) + TAIL
    for device in ("cpu", "meta"):
        given = [t.to(device) for t in operands()]
        with FlopCounterMode(display=False) as counter:
            y, *grads = results(run, given)
        assert (y.shape, [g.shape for g in grads]) == ((rows, B), [t.shape for t in given])
        counted.append(counter.get_total_flops())
    assert counted == [3 * 2 * rows * (A * B + RANK * (A + B))] * 2


def test_differentiating_twice_is_refused() -> None:
    x, *rest = operands()
    (dx,) = torch.autograd.grad(run(x.requires_grad_(), *rest).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_gathered_rows_are_not_kept() -> None:
    """With a plan the rows are those of `x`, once for each kept slot, in the product and again in its gradient."""
    x, *rest = operands()
    plan = plan_experts(torch.tensor([[0, 2], [2, -1], [0, 2], [2, 0]]), 3)
    saved: list[Tensor] = []
    leaves = [t.requires_grad_() for t in (x[:4].clone(), *rest)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(*leaves, offsets=plan.offsets_e, plan=plan)
    assert not any(t.shape == (y.shape[0], A) for t in saved)
    dy = torch.randn(y.shape)
    found = torch.autograd.grad(y, leaves, dy)
    for got, true in zip(found, torch.autograd.grad(run(leaves[0][plan.row_R], *leaves[1:], offsets=plan.offsets_e),
                                                    leaves, dy), strict=True):  # fmt: skip
        assert_close(got, true, 2e-6, "gathered")
