"""PyTorch's FLOP counter sees what experts multiply, once, whoever multiplies it, and no self-test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from test_backward import Operators
from trimtab import ExpertMLP, GroupedLinear
from trimtab.experts.recipes.hardware import MXFP8Engine, RowwiseEngine

E, D, F, K = 6, 64, 32, 2
KERNELS = ("cpu", "torch", "grouped_mm")


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, int]:
    """(x, ids, weights, kept slots): no token for expert 3, some slots dropped."""
    ids = torch.rand(rows, E).argsort(1)[:, :K]
    ids = ids.masked_fill((ids == 3) | (torch.rand(rows, K) < 0.2), -1)
    return torch.randn(rows, D, dtype=dtype), ids, torch.rand(rows, K), int((ids >= 0).sum())


def flops_of(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("rows", [0, 5, 300])
@pytest.mark.parametrize(("activation", "width"), [("swiglu", 2 * F), ("gelu", F)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_each_product_of_experts_counts_once(kernels: str, activation: str, width: int, rows: int) -> None:
    experts = ExpertMLP(E, D, F, activation=activation, kernels=kernels)
    x, ids, w, kept = inputs(rows)
    up, down = 2 * kept * D * width, 2 * kept * F * D
    assert flops_of(lambda: experts(x, ids, w)) == up + down, "the first use, with its self-test"
    assert flops_of(lambda: experts(x, ids, w).sum().backward()) == 2 * (up + down) + down, "x wants no gradient"
    x.requires_grad_()
    assert flops_of(lambda: experts(x, ids, w).sum().backward()) == 3 * (up + down)
    experts.get_parameter(experts.parameter_names[0]).requires_grad_(False)
    assert flops_of(lambda: experts(x, ids, w).sum().backward()) == 2 * up + 3 * down


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_a_selective_checkpoint_runs_again_counts_again(kernels: str) -> None:
    experts = ExpertMLP(E, D, F, kernels=kernels)
    x, ids, w, kept = inputs(70)
    x.requires_grad_()
    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    run = partial(checkpoint, experts, x, ids, w, use_reentrant=False, context_fn=context)
    assert flops_of(lambda: run().sum().backward()) == 4 * 2 * kept * (D * 2 * F + F * D)


@pytest.mark.parametrize("kernels", KERNELS)
def test_weight_gradients_count_when_they_are_taken(kernels: str) -> None:
    experts = ExpertMLP(E, D, F, delay_wgrad=True, kernels=kernels)
    x, ids, w, kept = inputs(70)
    x.requires_grad_()
    each = 2 * kept * (D * 2 * F + F * D)
    assert flops_of(lambda: experts(x, ids, w).sum().backward()) == 2 * each
    assert flops_of(experts.backward_dw) == each


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_linear(kernels: str, dtype: torch.dtype) -> None:
    linear, sizes = GroupedLinear(3, D, F, dtype=dtype, kernels=kernels), [40, 0, 70]
    x = torch.randn(sum(sizes), D, dtype=dtype, requires_grad=True)
    assert flops_of(lambda: linear(x, sizes).sum().backward()) == 3 * 2 * len(x) * D * F


@pytest.mark.parametrize("dim", [1024, 64])
def test_large_experts_in_either_way(dim: int) -> None:
    """In float32 on some machines by the machine's own GEMM, in others or with few rows by C++."""
    experts = ExpertMLP(2, dim, 1024)
    for rows in (3, 200, 700):
        x = torch.randn(rows, dim, requires_grad=True)
        ids, w = torch.arange(2 * rows).view(rows, 2) % 2, torch.rand(rows, 2)
        found = flops_of(lambda x=x, ids=ids, w=w: experts(x, ids, w).sum().backward())
        assert found == 3 * 2 * 2 * rows * 3 * 1024 * dim


@pytest.mark.parametrize("engine", [MXFP8Engine(), RowwiseEngine()])
def test_products_in_low_precision(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's product left out: no CPU has it."""
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", lambda left, *args, **kwargs: left)
    rows, weights, offsets, scale = torch.ones(70, D), torch.ones(3, F, D), torch.tensor([0, 10, 10, 70]), torch.ones(1)
    assert flops_of(lambda: engine.product((rows, scale), (weights, scale), offsets)) == 2 * 70 * D * F
    into = torch.ones(F, 70)
    assert flops_of(lambda: engine.product((rows.mT, scale), (into, scale), offsets)) == 2 * 70 * D * F


def test_a_graph_counts_what_eager_experts_do() -> None:
    experts = ExpertMLP(E, D, F)
    experts.compile(backend="aot_eager")
    x, ids, w, kept = inputs(50)
    for _ in range(2):
        assert flops_of(lambda: experts(x, ids, w)) == 2 * kept * 3 * D * F
        experts(x, ids, w)
    torch._dynamo.reset()  # what a mode saw compiled would be found by others


def test_another_mode_sees_neither_products_that_are_not_there_nor_the_self_test() -> None:
    x, ids, w, _ = inputs(20)
    seen = []
    experts = ExpertMLP(E, D, F, kernels="cpu")
    for _ in range(2):
        with Operators() as mode:
            experts(x, ids, w)
        seen.append(mode.names)
    assert seen[0] == seen[1]
    assert not [name for name in seen[0] if "mm" in name]
