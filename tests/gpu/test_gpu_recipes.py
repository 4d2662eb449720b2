"""Recipes on a CUDA device, on kernels of their own. A process of its own: where a grouped product of low precision
breaks the device, nothing else ends.

What a device cannot do is refused by trimtab, and that is what is tested there: a recipe's hardware is either equal to
its emulation or refused at construction.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpu.device import DEVICE, REHEARSED, need_offsets_on_the_device, needs_device
from gpu.test_gpu_experts import nothing_waits, one_graph_serves_a_linear, one_graph_serves_an_mlp
from helpers.expert_checks import HARDWARE, SIZES, A, B, G, LinearCase, hardware_is_emulation
from trimtab.errors import BackendError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.recipes.base import Recipe
from trimtab.experts.weight_grad import MODES

pytestmark = needs_device


def runs_here(recipe: Recipe) -> bool:
    return recipe.check(torch.device(DEVICE), A, B) == "hardware"


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("sizes", sorted(SIZES, key=lambda sizes: sizes.count(0)), ids=str)
def test_a_recipe_s_hardware_is_its_emulation_or_is_refused(name: str, sizes: list[int]) -> None:
    recipe = HARDWARE[name]
    if not runs_here(recipe):
        with pytest.raises(BackendError, match=r"needs .* Here are torch"):
            GroupedLinear(G, A, B, recipe=dataclasses.replace(recipe, backend="hardware"), device=DEVICE)
        if not REHEARSED:
            return
    for i, main_grad in enumerate(MODES):
        for delayed in (False, True):
            case = LinearCase(
                device=DEVICE, dtype=torch.bfloat16, sizes=tuple(sizes), tail=(0, 8, 128)[i], main_grad=main_grad,
                delayed=delayed, recipe=recipe, single=i != 1,
            )  # fmt: skip
            hardware_is_emulation(case)


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("promise", [nothing_waits, one_graph_serves_a_linear, one_graph_serves_an_mlp])
def test_sizes_stay_on_the_device(promise, name: str) -> None:  # type: ignore[no-untyped-def]
    if runs_here(HARDWARE[name]):
        need_offsets_on_the_device()
        promise(HARDWARE[name])
