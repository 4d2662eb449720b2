"""The Triton kernels on a CUDA device: values, the same bits each time, no host sync, one CUDA graph for every routing.

Skipped only where there is no CUDA device, one test where there is one.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from benchmarks.layer_step import captured
from gpu.test_gpu_experts import no_sync
from helpers.comparing import assert_close
from helpers.triton_checks import FALLS, Case, experts_are_true, ids_of, inputs_of, module_of, plan_is_true
from trimtab.experts.module import ExpertMLP
from trimtab.kernels.choose import KernelChoice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = "cuda"
LARGE = Case(rows=4096, top_k=8, experts=128, dim=2048, hidden=768)


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("fall", FALLS)
def test_the_plan_is_that_of_two_sorts(fall: str, alignment: int) -> None:
    for rows, experts in ((0, 3), (1, 3), (37, 6), (5000, 128), (3000, 256)):
        plan_is_true(Case(fall=fall, rows=rows, experts=experts), CUDA, alignment)


@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_experts_are_true(fall: str, dtype: torch.dtype) -> None:
    for rows, dim, hidden in ((0, 256, 128), (1, 256, 128), (200, 256, 128), (130, 96, 80)):
        experts_are_true(Case(fall=fall, rows=rows, dim=dim, hidden=hidden, dtype=dtype), CUDA)


@pytest.mark.parametrize("main_grad", ["accumulate", "overwrite"])
def test_weight_gradients_go_where_they_are_kept(main_grad: str) -> None:
    experts_are_true(Case(fall="cold", main_grad=main_grad), CUDA)


@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_experts_in_float32_are_true_under_autocast(fall: str, autocast: torch.dtype) -> None:
    experts_are_true(Case(fall=fall, dtype=torch.float32, autocast=autocast), CUDA)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one device")
def test_a_layer_on_a_device_that_is_not_current_is_true() -> None:
    with torch.cuda.device(0):
        plan_is_true(Case(), "cuda:1", 16)
        experts_are_true(Case(), "cuda:1")


Large = tuple[ExpertMLP, tuple[Tensor, Tensor, Tensor, Tensor]]


def large_layer() -> Large:
    """Its parameters are drawn on the device: the host takes seconds."""
    torch.manual_seed(0)
    module = ExpertMLP(
        LARGE.experts, LARGE.dim, LARGE.hidden, dtype=LARGE.dtype, kernels=LARGE.kernels, device=CUDA
    )  # fmt: skip
    return module, inputs_of(LARGE, CUDA)


@pytest.fixture(scope="module")
def large() -> Large:
    return large_layer()


def step(module: torch.nn.Module, x: Tensor, ids: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    y = module(x, ids, w)
    return [y.detach(), *torch.autograd.grad(y, [x, w, *module.parameters()], dy)]


def test_a_large_layer_equals_stock_and_itself_bit_for_bit(large: Large) -> None:
    module, given = large
    first, second = step(module, *given), step(module, *given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del second
    other = copy.copy(module)
    other.kernels = KernelChoice("grouped_mm")
    for name, got, wanted in zip(("y", "dx", "dw", "dup", "ddown"), first, step(other, *given), strict=True):
        for i, (part, true) in enumerate(zip(got.chunk(8), wanted.chunk(8), strict=True)):  # float64 of all is much
            assert_close(part, true, 3e-2, f"{name}, part {i}")


def test_nothing_waits_for_the_device(large: Large) -> None:
    module, given = large
    step(module, *given)  # self-tests and compilation
    torch.cuda.synchronize()
    with no_sync():
        step(module, *given)


def test_one_graph_serves_every_routing() -> None:
    case = Case(rows=300)
    module, (x, ids, w, dy) = module_of(case, CUDA), inputs_of(case, CUDA)
    graph = captured(lambda: step(module, x, ids, w, dy))
    for seed, fall in enumerate(FALLS):
        ids.copy_(ids_of(Case(rows=300, fall=fall), seed))
        replayed = [t.clone() for t in graph()]
        for i, (got, wanted) in enumerate(zip(replayed, step(module, x, ids, w, dy), strict=True)):
            assert torch.equal(got, wanted), (fall, i)


def test_what_is_saved_is_the_tokens_and_the_pre_activations(large: Large) -> None:
    module, (x, ids, w, _) = large
    kept: list[Tensor] = []
    module(x, ids, w)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x, ids, w)
    params = {p.data_ptr() for p in module.parameters()}
    bytes_kept = sum(t.nbytes for t in {t.data_ptr(): t for t in kept}.values() if t.data_ptr() not in params)
    slots = LARGE.rows * LARGE.top_k
    assert bytes_kept == 2 * (LARGE.rows * LARGE.dim + slots * 2 * LARGE.hidden) + 4 * slots  # bf16, weights in float32
