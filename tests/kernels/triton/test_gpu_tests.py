"""What tests/gpu runs on a device runs here on the CPU first, where a mistake in a test costs no time on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from gpu import test_gpu_experts as experts
from gpu import test_gpu_triton as layers
from helpers.triton_checks import Case
from trimtab.kernels.choose import KernelChoice

LOOP = Case(kernels=KernelChoice("torch"), dtype=torch.float32)


class Again:
    """In place of a CUDA graph: runs what it would replay."""

    def __init__(self, run: Callable[[], list[torch.Tensor]]) -> None:
        self.run = run

    def __call__(self) -> list[torch.Tensor]:
        return self.run()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (experts, layers):
        monkeypatch.setattr(module, "CUDA", "cpu")
        monkeypatch.setattr(module, "captured", Again)
        monkeypatch.setattr(module, "no_sync", nullcontext)
    monkeypatch.setattr(experts, "need_offsets_on_the_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(layers, "Case", lambda **given: replace(LOOP, **given))
    monkeypatch.setattr(layers, "LARGE", replace(LOOP, rows=64, top_k=4, experts=8, dim=64, hidden=48))


def test_graphs_and_syncs() -> None:
    experts.test_one_graph_serves_every_split_of_a_grouped_linear()
    experts.test_one_graph_serves_every_routing_of_an_expert_mlp()
    experts.test_nothing_waits_for_the_device()
    layers.test_one_graph_serves_every_routing()
    layers.test_nothing_waits_for_the_device(layers.large_layer())


def test_a_large_layer() -> None:
    layers.test_a_large_layer_equals_stock_and_itself_bit_for_bit(layers.large_layer())


@pytest.mark.parametrize("dtype", experts.BOUNDS, ids=str)
def test_values(dtype: torch.dtype) -> None:
    for form, sizes in zip(("list", "cpu", "device", "list"), experts.SIZES, strict=True):
        experts.test_grouped_linear_is_true(dtype, sizes, form)
    experts.test_expert_mlp_is_true(37)


@pytest.mark.parametrize("name", experts.HARDWARE)
def test_recipes(name: str) -> None:
    experts.test_a_recipe_s_hardware_is_its_emulation_or_is_refused(name, experts.SIZES[0])
    for sizes in experts.SIZES:
        case = experts.LinearCase(
            device="cpu", dtype=torch.bfloat16, sizes=tuple(sizes), tail=8, recipe=experts.HARDWARE[name]
        )  # fmt: skip
        experts.hardware_is_emulation(case)
