"""Experts on a CUDA device, on the kernels that it takes by itself: values, no host sync, a CUDA graph for every split.

Skipped only where there is no CUDA device.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from gpu.device import DEVICE, need_offsets_on_the_device, needs_device, no_sync, one_graph_serves
from helpers.expert_checks import (
    BOUNDS,
    SIZES,
    A,
    B,
    G,
    LinearCase,
    clipped_by_one_factor,
    linear_is_true,
    mlp,
    mlp_inputs,
    mlp_is_true,
)
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.recipes.base import Recipe
from trimtab.experts.weight_grad import MODES
from trimtab.kernels.choose import KernelChoice, names_for

pytestmark = needs_device


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_kernels_pass_their_self_test(dtype: torch.dtype) -> None:
    device = torch.empty(0, device=DEVICE).device
    for name in names_for("auto", device):
        choice = KernelChoice(name)
        choice.on(device, dtype)
        assert [report.fault for report in choice.reports] == [None]


@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_expert_mlp_is_true(tokens: int) -> None:
    mlp_is_true(DEVICE, tokens)


def nothing_waits(recipe: Recipe | None) -> None:
    layer = GroupedLinear(G, A, B, dtype=torch.bfloat16, device=DEVICE, recipe=recipe)
    module = mlp(DEVICE, recipe)
    x = torch.randn(64, A, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    sizes, inputs = torch.tensor([10, 0, 50, 1], device=DEVICE), mlp_inputs(DEVICE, 33)

    def step() -> None:
        layer(x, sizes).sum().backward()
        module(*inputs).sum().backward()

    step()  # self-tests and compilation
    with no_sync():
        step()


def one_graph_serves_a_linear(recipe: Recipe | None) -> None:
    layer = GroupedLinear(G, A, B, dtype=torch.bfloat16, device=DEVICE, recipe=recipe)
    x = torch.randn(208, A, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(208, B, device=DEVICE, dtype=torch.bfloat16)
    sizes = torch.tensor(SIZES[0], device=DEVICE)

    def run() -> list[Tensor]:
        y = layer(x, sizes)
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]

    splits = (*SIZES, [52, 52, 52, 52])
    one_graph_serves(run, {f"{recipe} {split}": partial(sizes.copy_, torch.tensor(split)) for split in splits})


def one_graph_serves_an_mlp(recipe: Recipe | None) -> None:
    module, (x, ids, w) = mlp(DEVICE, recipe), mlp_inputs(DEVICE, 33)
    dy = torch.randn_like(x)

    def run() -> list[Tensor]:
        y = module(x, ids, w)
        return [y.detach(), *torch.autograd.grad(y, [x, w, *module.parameters()], dy)]

    @torch.no_grad()
    def draw(seed: int) -> None:
        for mine, theirs in zip((x, ids, w), mlp_inputs(DEVICE, 33, seed), strict=True):
            mine.copy_(theirs)

    graph = one_graph_serves(run, {f"{recipe} seed {seed}": partial(draw, seed) for seed in range(1, 4)})
    ids.fill_(-1)  # nothing at all
    assert all(not t.any() for t in graph())


@pytest.mark.parametrize("promise", [nothing_waits, one_graph_serves_a_linear, one_graph_serves_an_mlp])
def test_sizes_stay_on_the_device(promise) -> None:  # type: ignore[no-untyped-def]
    need_offsets_on_the_device()
    promise(None)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", ["list", "cpu", "device"])
def test_grouped_linear_is_true(dtype: torch.dtype, sizes: list[int], form: str) -> None:
    for i, main_grad in enumerate(MODES):
        for delayed in (False, True):
            case = LinearCase(
                device=DEVICE, dtype=dtype, sizes=tuple(sizes), form=form, tail=8 * (i % 2), main_grad=main_grad,
                delayed=delayed, single=i != 1,
            )  # fmt: skip
            linear_is_true(case)


def test_gradients_are_clipped_by_one_factor() -> None:
    for dtype in BOUNDS:
        clipped_by_one_factor(DEVICE, dtype, 10_000.0)
