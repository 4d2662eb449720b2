"""Experts on a CUDA device: values, no host sync, one CUDA graph for every split, recipes on their own kernels.

Skipped only where there is no CUDA device. What a device cannot do is refused by trimtab, and that is what is tested
there: a recipe's hardware is either equal to its emulation or refused at construction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from benchmarks.layer_step import captured
from helpers.comparing import assert_close
from helpers.expert_checks import (
    BOUNDS,
    HARDWARE,
    SIZES,
    A,
    B,
    G,
    LinearCase,
    clipped_by_one_factor,
    hardware_is_emulation,
    linear_is_true,
    mlp,
    mlp_inputs,
    mlp_is_true,
)
from trimtab.errors import BackendError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.recipes.base import Recipe
from trimtab.experts.weight_grad import MODES
from trimtab.kernels.choose import KernelChoice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = "cuda"


def need_offsets_on_the_device() -> None:
    """Fails where the promise cannot be kept: before 9.0 torch's bfloat16 grouped GEMM is a loop on the host."""
    capability = torch.cuda.get_device_capability()
    assert capability[0] in (9, 10), f"torch's grouped GEMM reads the offsets on the host at capability {capability}"


@contextmanager
def no_sync() -> Iterator[None]:
    """Within: whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_kernels_pass_their_self_test(dtype: torch.dtype) -> None:
    choice = KernelChoice("grouped_mm")
    choice.on(torch.device(CUDA, torch.cuda.current_device()), dtype)
    assert [report.fault for report in choice.reports] == [None]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", ["list", "cpu", "device"])
def test_grouped_linear_is_true(dtype: torch.dtype, sizes: list[int], form: str) -> None:
    for i, main_grad in enumerate(MODES):
        for delayed in (False, True):
            case = LinearCase(
                device=CUDA, dtype=dtype, sizes=tuple(sizes), form=form, tail=8 * (i % 2), main_grad=main_grad,
                delayed=delayed, single=i != 1,
            )  # fmt: skip
            linear_is_true(case)


@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_expert_mlp_is_true(tokens: int) -> None:
    mlp_is_true(CUDA, tokens)


def test_gradients_are_clipped_by_one_factor() -> None:
    for dtype in BOUNDS:
        clipped_by_one_factor(CUDA, dtype, 10_000.0)


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_recipe_s_hardware_is_its_emulation_or_is_refused(name: str, sizes: list[int]) -> None:
    recipe = HARDWARE[name]
    demanded = dataclasses.replace(recipe, backend="hardware")
    if recipe.check(torch.device(CUDA), A, B) == "emulated":
        with pytest.raises(BackendError, match=r"needs .* Here are torch"):
            GroupedLinear(G, A, B, recipe=demanded, device=CUDA)
        return
    for i, main_grad in enumerate(MODES):
        for delayed in (False, True):
            case = LinearCase(
                device=CUDA, dtype=torch.bfloat16, sizes=tuple(sizes), tail=(0, 8, 128)[i], main_grad=main_grad,
                delayed=delayed, recipe=recipe, single=i != 1,
            )  # fmt: skip
            hardware_is_emulation(case)


def hardware_here() -> list[Recipe | None]:
    """No recipe, and those that run on their own kernels on this device."""
    return [None, *(r for r in HARDWARE.values() if r.check(torch.device(CUDA), A, B) == "hardware")]


def test_nothing_waits_for_the_device() -> None:
    need_offsets_on_the_device()
    for recipe in hardware_here():
        layer = GroupedLinear(G, A, B, dtype=torch.bfloat16, device=CUDA, recipe=recipe)
        module = mlp(CUDA, recipe)
        x = torch.randn(64, A, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        sizes, inputs = torch.tensor([10, 0, 50, 1], device=CUDA), mlp_inputs(CUDA, 33)

        def step(layer=layer, module=module, x=x, sizes=sizes, inputs=inputs) -> None:  # type: ignore[no-untyped-def]
            layer(x, sizes).sum().backward()
            module(*inputs).sum().backward()

        step()  # self-tests and compilation
        torch.cuda.synchronize()
        with no_sync():
            step()


def test_one_graph_serves_every_split_of_a_grouped_linear() -> None:
    need_offsets_on_the_device()
    for recipe in hardware_here():
        layer = GroupedLinear(G, A, B, dtype=torch.bfloat16, device=CUDA, recipe=recipe)
        x = torch.randn(208, A, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(208, B, device=CUDA, dtype=torch.bfloat16)
        sizes = torch.tensor(SIZES[0], device=CUDA)

        def run(layer=layer, x=x, dy=dy, sizes=sizes) -> list[Tensor]:  # type: ignore[no-untyped-def]
            y = layer(x, sizes)
            return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]

        graph = captured(run)
        for split in (*SIZES, [52, 52, 52, 52]):
            sizes.copy_(torch.tensor(split))
            replayed = [t.clone() for t in graph()]
            for name, got, wanted in zip(("y", "dx", "dw", "db"), replayed, run(), strict=True):
                assert_close(got.cpu(), wanted.cpu(), 1e-6, f"{recipe} {split}: {name}")


def test_one_graph_serves_every_routing_of_an_expert_mlp() -> None:
    need_offsets_on_the_device()
    for recipe in hardware_here():
        module, (x, ids, w) = mlp(CUDA, recipe), mlp_inputs(CUDA, 33)
        dy = torch.randn_like(x)

        def run(module=module, x=x, ids=ids, w=w, dy=dy) -> list[Tensor]:  # type: ignore[no-untyped-def]
            y = module(x, ids, w)
            return [y.detach(), *torch.autograd.grad(y, [x, w, *module.parameters()], dy)]

        graph = captured(run)
        for seed in range(1, 4):
            other = mlp_inputs(CUDA, 33, seed)
            with torch.no_grad():
                for mine, theirs in zip((x, ids, w), other, strict=True):
                    mine.copy_(theirs)
            replayed = [t.clone() for t in graph()]
            for i, (got, wanted) in enumerate(zip(replayed, run(), strict=True)):
                assert_close(got.cpu(), wanted.cpu(), 1e-6, f"{recipe} seed {seed}: result {i}")
        ids.fill_(-1)  # nothing at all
        assert all(not t.any() for t in graph())
