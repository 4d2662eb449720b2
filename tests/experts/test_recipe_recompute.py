"""Activation checkpointing of layers with a recipe: the same bits as without, and each step recorded once.

Delayed scaling is the hard one. Its scales come from the steps before, and a forward that is computed again must be
taken neither for a step of its own nor for the latest of several microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.recipe_cases import KINDS, RECIPES
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import FP8Delayed

E, D, F, M, K = 4, 16, 24, 12, 2
DELAYED = {
    "fp8_delayed_latest": FP8Delayed(backend="emulated", history=8, algorithm="latest"),
    "fp8_delayed_short": FP8Delayed(backend="emulated", history=1),  # fewer steps than are in flight
}
LAYERS = ("linear", "mlp", "mlp_delayed")
NAMES = (*(n for n in KINDS if n != "nvfp4"), *DELAYED)  # nvfp4 draws other noise


def make(layer: str, name: str) -> tuple[torch.nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(0)
    recipe = (RECIPES | DELAYED)[name]
    if layer.startswith("linear"):
        linear = GroupedLinear(E, D, D, recipe=recipe)
        return linear, lambda x, ids, w: linear(x, torch.bincount(ids[:, 0], minlength=E).tolist()) * w[:, :1]
    options = {"delay_wgrad": layer == "mlp_delayed"}
    mlp = ExpertMLP(E, D, F, recipe=recipe, bias=True, **options)
    return mlp, mlp


def batches(count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Magnitudes that go up and down, so that a scale of the wrong step shows."""
    g = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        x = torch.randn(M, D, generator=g) * 4.0 ** (i % 3)
        ids = torch.randint(0, E - 1, (M, K), generator=g).sort(0).values
        made.append((x.requires_grad_(), ids, torch.rand(M, K, generator=g).requires_grad_()))
    return made


def train(layer: str, name: str, reentrant: bool | None, in_flight: int) -> list[Tensor]:
    """Three rounds of forwards and their backwards, first in first out, while weights grow; then all that is left."""
    module, call = make(layer, name)
    found: list[Tensor] = []
    for _ in range(3):
        parts = batches(in_flight)
        runs = [
            call(*part) if reentrant is None else checkpoint(call, *part, use_reentrant=reentrant) for part in parts
        ]
        for part, y in zip(parts, runs, strict=True):
            y.square().sum().backward()
            if layer == "mlp_delayed":
                module.backward_dw()
            found += [y.detach(), part[0].grad, part[2].grad]
        with torch.no_grad():
            for p in module.parameters():
                p *= 1.25
    found += [p.grad for p in module.parameters()]
    return found + [b.clone() for key, b in module.named_buffers() if key.endswith("history_He")]


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_checkpointing_changes_no_bit(layer: str, reentrant: bool, in_flight: int) -> None:
    for name in NAMES:
        plain, recomputed = (train(layer, name, way, in_flight) for way in (None, reentrant))
        assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True)), name


def test_each_step_is_recorded_once() -> None:
    for reentrant in (False, True):
        module, call = make("mlp", "fp8_delayed_latest")
        for part in batches(3):
            checkpoint(call, *part, use_reentrant=reentrant).sum().backward()
        for name, history in module.named_buffers():
            if name.endswith("history_He"):
                assert (history.amax(1) > 0).sum() == 3, name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{"algorithm": "latest"}, {"history": 3}], ids=str)
def test_a_recompute_tells_the_history_of_another_microbatch_nothing(options: dict[str, Any], reentrant: bool) -> None:
    """The larger of two microbatches runs again when the smaller one's step is the latest."""

    def outputs(way: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        linear, found = GroupedLinear(2, 32, 32, bias=False, recipe=FP8Delayed(backend="emulated", **options)), []
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            xs = [(torch.randn(32, 32, generator=g) * by).requires_grad_() for by in (4.0, 1.3)]

            def call(x: Tensor) -> Tensor:
                return linear(x, [16, 16])

            ys = [call(x) if way is None else checkpoint(call, x, use_reentrant=way) for x in xs]
            for y in ys:
                y.square().sum().backward()
                found.append(y.detach())
        return found

    assert all(torch.equal(a, b) for a, b in zip(outputs(None), outputs(reentrant), strict=True))
