"""What is refused and with which words, what is chosen, and what is stored."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.recipe_bounds import scale_dtype
from helpers.recipe_cases import NAMES, RECIPES, WEIGHTS, normal, offsets
from trimtab.errors import BackendError, ConfigError
from trimtab.experts.recipes import MXFP8, FP8Blockwise, FP8Rowwise, Recipe
from trimtab.experts.recipes.numbers import E2M1
from trimtab.layout import ALIGNMENTS

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


@pytest.mark.parametrize("name", NAMES)
def test_hardware_is_refused_with_what_it_needs_and_what_is_here(name: str) -> None:
    recipe = RECIPES[name]
    recipe.check(CPU, 100, 3)  # emulation takes any width
    real = dataclasses.replace(recipe, backend="hardware")
    engine = real.engine()
    why = recipe.no_engine if engine is None else rf"needs .* {engine.capability[0]}\.0 .*device cpu with no CUDA"
    with pytest.raises(BackendError, match=f"{why}.*'emulated'"):
        real.check(CPU, 256, 256)
    assert recipe.check(CPU, 256, 256) == "emulated"
    assert dataclasses.replace(recipe, backend="auto").check(CPU, 256, 256) == "emulated"


def test_hardware_is_refused_for_the_wrong_gpu_and_for_widths_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FP8Rowwise(backend="hardware")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BackendError, match=r"capability 9\.0 .*device cuda with compute capability 8\.0"):
        recipe.check(CUDA, 256, 256)
    assert FP8Rowwise(backend="auto").check(CUDA, 256, 256) == "emulated"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for backend in ("auto", "hardware"):
        assert FP8Rowwise(backend=backend).check(CUDA, 256, 256) == "hardware"
        assert FP8Rowwise(backend=backend).check(META, 256, 256) == "hardware"
    assert FP8Rowwise(backend="emulated").check(CUDA, 256, 256) == "emulated"
    assert FP8Blockwise(backend="auto").check(CUDA, 256, 256) == "emulated"
    with pytest.raises(BackendError, match="torch has no grouped product for it"):
        FP8Blockwise(backend="hardware").check(CUDA, 256, 256)
    assert FP8Rowwise(backend="auto").check(CUDA, 256, 250) == "emulated"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert MXFP8(backend="auto").check(CUDA, 256, 256) == "hardware"
    assert MXFP8(backend="auto", hybrid=True).check(CUDA, 256, 256) == "emulated"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert MXFP8(backend="hardware").check(CUDA, 256, 256) == "hardware"
    for capability in ((9, 0), (12, 0)):  # torch refuses another generation
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert MXFP8(backend="auto").check(CUDA, 256, 256) == "emulated"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(BackendError, match="widths 256 and 250"):
        recipe.check(CUDA, 256, 250)


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="backend 'fast'"):
        FP8Rowwise(backend="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scale_rounding 'up'"):
        MXFP8(backend="emulated", scale_rounding="up")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="backend"):
        FP8Rowwise()  # type: ignore[call-arg]


@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_values_with_an_alignment_of_the_layout(name: str) -> None:
    recipe: Recipe = RECIPES[name]
    assert recipe == dataclasses.replace(RECIPES[name])
    assert hash(recipe) == hash(dataclasses.replace(RECIPES[name]))
    assert recipe.alignment in ALIGNMENTS
    assert name.startswith(recipe.name)
    assert recipe.state() is not recipe.state()


@pytest.mark.parametrize("name", NAMES)
def test_values_and_scales_are_what_the_formats_hold(name: str) -> None:
    recipe = RECIPES[name]
    state, cuts = recipe.state(), offsets(recipe, 1, 2)
    x, w = normal(int(cuts[-1]), 40), normal(2, 40, 24)
    found = {
        "activation": [state.encode(x, cuts, "activation", a) for a in ("row", "column")],
        "gradient": [state.encode(x, cuts, "gradient", a) for a in ("row", "column")],
        "weight": [state.encode(w, None, "weight", a) for a in WEIGHTS],
    }
    for role, quantized in found.items():
        form = recipe.form(role)
        for q in quantized:
            if form is E2M1:
                assert torch.isin(q.values.abs(), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])).all()
            else:
                assert torch.equal(q.values.to(form.dtype).float(), q.values)
            assert torch.equal(q.scale.to(scale_dtype(recipe)).float(), q.scale)
            assert torch.equal(q.decoded(), q.values * q.factor)
