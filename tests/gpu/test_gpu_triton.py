"""Experts on Triton's kernels on a CUDA device, with PyTorch's grouped GEMM between them and with our own: values, the
same bits each time, no host sync, one CUDA graph for every routing.

Skipped only where there is no CUDA device, one test where there is one. Rehearsed on the CPU with other kernels.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.device import DEVICE, REHEARSED, need_offsets_on_the_device, needs_device, no_sync, one_graph_serves
from helpers.comparing import assert_close
from helpers.triton_checks import FALLS, Case, experts_are_true, ids_of, inputs_of, module_of, plan_is_true
from trimtab.experts.module import ExpertMLP
from trimtab.kernels.choose import KernelChoice

pytestmark = needs_device

NAMES = ("torch", "grouped_mm") if REHEARSED else ("triton", "grouped_mm+triton")
DTYPES = [torch.bfloat16] if REHEARSED else [torch.bfloat16, torch.float16, torch.float32]
CHOICES = {name: KernelChoice(name) for name in NAMES}
"""Tested once on a device. The first one's sizes stay on the device whatever the dtype and the architecture."""
on_each = pytest.mark.parametrize("name", NAMES)
Large = tuple[ExpertMLP, tuple[Tensor, Tensor, Tensor, Tensor]]


def case_of(name: str = NAMES[0], **given: Any) -> Case:
    return Case(**{**given, "kernels": CHOICES[name], **({"dtype": torch.float32} if REHEARSED else {})})


LARGE = case_of(rows=4096, top_k=8, experts=128, dim=2048, hidden=768)
if REHEARSED:
    LARGE = case_of(rows=64, top_k=4, experts=8, dim=64, hidden=48)


@pytest.fixture(scope="module")
def large() -> Large:
    """Its parameters are drawn on the device: the host takes seconds."""
    torch.manual_seed(0)
    module = ExpertMLP(LARGE.experts, LARGE.dim, LARGE.hidden, dtype=LARGE.dtype, kernels=LARGE.kernels, device=DEVICE)
    return module, inputs_of(LARGE, DEVICE)


def on(name: str, large: Large) -> Large:
    """The same parameters on other kernels."""
    other = copy.copy(large[0])
    other.kernels = CHOICES[name]
    if name != NAMES[0]:
        need_offsets_on_the_device()
    return other, large[1]


def step(module: torch.nn.Module, x: Tensor, ids: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    y = module(x, ids, w)
    return [y.detach(), *torch.autograd.grad(y, [x, w, *module.parameters()], dy)]


@on_each
@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_are_true(fall: str, dtype: torch.dtype, name: str) -> None:
    for rows, dim, hidden in ((0, 256, 128), (1, 256, 128), (200, 256, 128), (130, 96, 80)):
        experts_are_true(case_of(name, fall=fall, rows=rows, dim=dim, hidden=hidden, dtype=dtype), DEVICE)


@on_each
def test_a_large_layer_equals_stock_and_itself_bit_for_bit(large: Large, name: str) -> None:
    module, given = on(name, large)
    first, second = step(module, *given), step(module, *given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del second
    other = copy.copy(module)
    other.kernels = KernelChoice("grouped_mm")
    for part, got, wanted in zip(("y", "dx", "dw", "dup", "ddown"), first, step(other, *given), strict=True):
        for i, (some, true) in enumerate(zip(got.chunk(8), wanted.chunk(8), strict=True)):  # float64 of all is much
            assert_close(some, true, 3e-2, f"{part}, part {i}")


@on_each
def test_nothing_waits_for_the_device(large: Large, name: str) -> None:
    module, given = on(name, large)
    step(module, *given)  # self-tests and compilation
    with no_sync():
        step(module, *given)


@on_each
def test_one_graph_serves_every_routing(large: Large, name: str) -> None:
    on(name, large)
    case = case_of(name, rows=300)
    module, (x, ids, w, dy) = module_of(case, DEVICE), inputs_of(case, DEVICE)
    drawn = {fall: ids_of(case_of(rows=300, fall=fall), seed) for seed, fall in enumerate(FALLS)}
    changes = {fall: partial(ids.copy_, other) for fall, other in drawn.items()}
    one_graph_serves(lambda: step(module, x, ids, w, dy), changes, bound=0)


@pytest.mark.skipif(REHEARSED, reason="interpreted in tests/gpu_evidence")
@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("fall", FALLS)
def test_the_plan_is_that_of_two_sorts(fall: str, alignment: int) -> None:
    for rows, experts in ((0, 3), (1, 3), (37, 6), (5000, 128), (3000, 256)):
        plan_is_true(case_of(fall=fall, rows=rows, experts=experts), DEVICE, alignment)


@pytest.mark.parametrize("main_grad", ["accumulate", "overwrite"])
@on_each
def test_weight_gradients_go_where_they_are_kept(main_grad: str, name: str) -> None:
    experts_are_true(case_of(name, fall="cold", main_grad=main_grad), DEVICE)


@on_each
@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("autocast", DTYPES[:2], ids=str)
def test_experts_in_float32_are_true_under_autocast(fall: str, autocast: torch.dtype, name: str) -> None:
    experts_are_true(case_of(name, fall=fall, dtype=torch.float32, autocast=autocast), DEVICE)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one device")
def test_a_layer_on_a_device_that_is_not_current_is_true() -> None:
    with torch.cuda.device(0):
        plan_is_true(case_of(), "cuda:1", 16)
        experts_are_true(case_of(), "cuda:1")


@on_each
def test_what_is_saved_is_the_tokens_and_the_pre_activations(large: Large, name: str) -> None:
    module, (x, ids, w, _) = on(name, large)
    kept: list[Tensor] = []
    module(x, ids, w)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x, ids, w)
    params = {p.data_ptr() for p in module.parameters()}
    values = {t.data_ptr(): t for t in kept if t.is_floating_point() and t.data_ptr() not in params}
    bytes_kept = sum(t.nbytes for t in values.values())
    slots, size = LARGE.rows * LARGE.top_k, LARGE.dtype.itemsize
    saved = size * (LARGE.rows * LARGE.dim + slots * 2 * LARGE.hidden)  # and weights in float32, if they are kept
    assert bytes_kept in (saved, saved + 4 * slots), bytes_kept
