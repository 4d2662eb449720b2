"""Layers on a recipe's own kernels, which stand-ins play here, against its emulation: by value, both directions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close
from helpers.linear_cases import KERNELS
from helpers.stand_ins import PAIRS
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import FP8Rowwise, Recipe
from trimtab.experts.recipes.base import Way
from trimtab.experts.recipes.hardware import Packed
from trimtab.experts.weight_grad import MODES

G, A, B = 4, 128, 256
# A product that the hardware rounds to bfloat16 is off by half a unit of the last place, and what follows builds on it.
BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
SIZES = ([3, 0, 140, 1], [0, 0, 0, 0], [0, 7, 0, 0])


def run_linear(recipe: Recipe, dtype: torch.dtype, sizes: list[int], tail: int, **options: object) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layer = GroupedLinear(G, A, B, dtype=dtype, recipe=recipe, **options)
    for param in layer.weights:
        param.main_grad = torch.full_like(param, 3.0, dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    rows = sum(sizes) + tail
    x, dy = (torch.randn(rows, n, generator=g).to(dtype) for n in (A, B))
    x[sum(sizes) :] = dy[sum(sizes) :] = torch.nan
    x.requires_grad_()
    y = layer(x, sizes)
    y.backward(dy)
    layer.backward_dw()
    assert y.dtype == x.grad.dtype == dtype
    found = {"y": y.detach(), "dx": x.grad}
    for key, param in layer.named_parameters():
        assert param.grad.dtype == dtype
        found[key] = param.main_grad if layer.main_grad != "off" and key.startswith("weight") else param.grad
    return found


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_grouped_linear(name: str, dtype: torch.dtype) -> None:
    stand_in, emulated = PAIRS[name]
    flags = (False, True)
    for i, (sizes, single, delayed, bias) in enumerate(product(SIZES, flags, flags, flags)):
        options = {
            "single_parameter": single, "delay_wgrad": delayed, "bias": bias, "main_grad": MODES[i % 3],
            "kernels": list(KERNELS.values())[i % 2],
        }  # fmt: skip
        wanted = run_linear(emulated, dtype, sizes, i % 4, **options)
        got = run_linear(stand_in(backend="hardware", dtype=dtype), dtype, sizes, i % 4, **options)
        for key, value in got.items():
            assert_close(value, wanted[key], BOUNDS[dtype], f"{sizes} {options}: {key}")


def run_mlp(recipe: Recipe, dtype: torch.dtype, routing: str, **options: object) -> dict[str, Tensor]:
    torch.manual_seed(0)
    mlp = ExpertMLP(G, A, A, dtype=dtype, recipe=recipe, **options)
    for param in (mlp.get_parameter(name) for name in mlp.parameter_names[:2]):
        param.main_grad = torch.full_like(param, 3.0, dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(9, A, generator=g).to(dtype) for _ in range(2))
    ids = torch.randint(-1, G - 1, (9, 2), generator=g)
    ids = torch.full_like(ids, -1) if routing == "none" else ids
    w = torch.rand(9, 2, generator=g).requires_grad_()
    x.requires_grad_()
    y = mlp(x, ids, w)
    y.backward(dy)
    mlp.backward_dw()
    mode = mlp.main_grad
    found = {"y": y.detach(), "dx": x.grad, "dw": w.grad}
    for key, param in mlp.named_parameters():
        assert param.grad.dtype == dtype
        found[key] = param.main_grad if mode != "off" and key in mlp.parameter_names[:2] else param.grad
    return found


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", PAIRS)
def test_expert_mlp(name: str) -> None:
    stand_in, emulated = PAIRS[name]
    flags = (False, True)
    for i, (routing, bias, delayed) in enumerate(product(("random", "none"), flags, flags)):
        options = {
            "bias": bias, "delay_wgrad": delayed, "main_grad": MODES[i % 3],
            "activation": ("swiglu", "relu_squared")[i % 2], "kernels": list(KERNELS.values())[(i // 2) % 2],
        }  # fmt: skip
        wanted = run_mlp(emulated, torch.float32, routing, **options)
        got = run_mlp(stand_in(backend="hardware"), torch.float32, routing, **options)
        for key, value in got.items():
            assert_close(value, wanted[key], 2e-5, f"{routing} {options}: {key}")


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_kept_for_the_weight_gradient_is_one_byte_a_value(name: str) -> None:
    stand_in, _ = PAIRS[name]
    layer = GroupedLinear(G, A, B, recipe=stand_in(backend="hardware"), dtype=torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(128, A, dtype=torch.bfloat16), [128, 0, 0, 0])
    own = {t.data_ptr() for t in layer.parameters()}
    kept = [t for t in saved if t.data_ptr() not in own]
    values = [t for t in kept if t.dtype == torch.float8_e4m3fn]
    assert [t.numel() for t in values] == [128 * A]
    assert sum(t.numel() * t.element_size() for t in kept) <= 128 * A + 4 * G * A  # and their scales


def torch_checks(self: Any, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
    """torch's own checks of shapes, strides and scales; the public function has none for the meta device."""
    offs = offsets_e[1:].int()
    return torch._scaled_grouped_mm(x[0], w[0].mT, x[1], w[1], offs=offs, out_dtype=torch.bfloat16)


class OnMeta:
    """A recipe whose kernels know shapes only. Whatever reads a size on the host raises on the meta device."""

    def __init__(self, name: str) -> None:
        stand_in, emulated = PAIRS[name]
        self.name, self.alignment, self.state = emulated.name, emulated.alignment, emulated.state
        kind = type(stand_in(backend="hardware").engine())
        made = type("Meta", (kind,), {"product": torch_checks})
        self.engine = lambda: made(torch.bfloat16)

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        return "hardware"


@pytest.mark.parametrize("rows", [0, 11])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_nothing_is_read_on_the_host(name: str, delayed: bool, rows: int) -> None:
    linear = GroupedLinear(G, A, B, recipe=OnMeta(name), dtype=torch.bfloat16, device="meta", delay_wgrad=delayed)
    x = torch.empty(rows, A, device="meta", dtype=torch.bfloat16, requires_grad=True)
    linear(x, torch.empty(G, device="meta", dtype=torch.int32)).sum().backward()
    linear.backward_dw()
    mlp = ExpertMLP(G, A, A, recipe=OnMeta(name), dtype=torch.bfloat16, device="meta", delay_wgrad=delayed, bias=True)
    ids = torch.empty(rows, 2, device="meta", dtype=torch.int64)
    mlp(x, ids, torch.empty(rows, 2, device="meta")).sum().backward()
    mlp.backward_dw()
    assert x.grad.shape == x.shape
    for layer in (linear, mlp):
        assert all((p.grad.shape, p.grad.dtype) == (p.shape, torch.bfloat16) for p in layer.parameters())


def test_layers_say_how_they_compute() -> None:
    stand_in, emulated = PAIRS["rowwise"]
    ways = {"hardware": stand_in(backend="hardware"), "emulated": emulated}
    for way, recipe in ways.items():
        for layer in (GroupedLinear(G, A, B, recipe=recipe), ExpertMLP(G, A, A, recipe=recipe)):
            assert layer.recipe_way == way
            assert f"recipe=fp8_rowwise ({way})" in repr(layer)
    assert GroupedLinear(G, A, B).recipe_way is ExpertMLP(G, A, A).recipe_way is None
    assert GroupedLinear(G, A, B, recipe=FP8Rowwise(backend="auto")).recipe_way == "emulated"  # here is no GPU
