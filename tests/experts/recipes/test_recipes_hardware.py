"""What is refused and with which words; what is stored; the real row-wise product as far as it goes without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from recipe_cases import NAMES, RECIPES, WEIGHTS, normal, offsets
from torch import Tensor

from trimtab.errors import BackendError, ConfigError
from trimtab.experts.recipes import MXFP8, FP8Rowwise, Recipe
from trimtab.experts.recipes.formats import E2M1, E4M3
from trimtab.experts.recipes.hardware import rowwise_dgrad, rowwise_forward, rowwise_wgrad
from trimtab.layout import ALIGNMENTS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", NAMES)
def test_hardware_is_refused_with_what_it_needs_and_what_is_here(name: str) -> None:
    recipe = RECIPES[name]
    recipe.check(CPU, 100, 3)  # emulation takes any width
    real = dataclasses.replace(recipe, backend="hardware")
    major, minor = real.hardware().capabilities[-1]
    with pytest.raises(BackendError, match=rf"needs .* {major}\.{minor}.*this machine has device cpu.*'emulated'"):
        real.check(CPU, 256, 256)
    with pytest.raises(BackendError, match="no dequantising state"):
        real.state()


def test_hardware_is_refused_for_the_wrong_gpu_and_for_widths_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FP8Rowwise(backend="hardware")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BackendError, match=r"capability 9\.0; this machine has A100 with compute capability 8\.0"):
        recipe.check(CUDA, 256, 256)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    recipe.check(CUDA, 256, 256)
    with pytest.raises(BackendError, match="in_features 256 and out_features 250"):
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
    formats, state, cuts = recipe.formats(), recipe.emulation(), offsets(recipe, 1, 2)
    x, w = normal(int(cuts[-1]), 40), normal(2, 40, 24)
    found = {
        "activation": [state.quantise_rows(x, cuts, a, "activation") for a in ("row", "column")],
        "gradient": [state.quantise_rows(x, cuts, a, "gradient") for a in ("row", "column")],
        "weight": [state.quantise_weight(w, a) for a in WEIGHTS],
    }
    for role, quantised in found.items():
        stored = getattr(formats, role)
        for q in quantised:
            if stored.values == E2M1.dtype:
                assert torch.isin(q.values.abs(), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])).all()
            else:
                assert torch.equal(q.values.to(stored.values).float(), q.values)
            assert torch.equal(q.scale.to(stored.scales).float(), q.scale)
            assert torch.equal(q.dequantised(), q.values * q.factor)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """Records what the kernel is given; its stand-in multiplies as documented, in float32."""
    seen: list[tuple[Tensor, ...]] = []

    def kernel(
        left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, *, offs: Tensor, **_: object
    ) -> Tensor:
        seen.append((left, right, left_scale, right_scale, offs))
        ends = offs.tolist()
        parts = list(zip([0, *ends[:-1]], ends, strict=True))
        a, b = left.float(), right.float()
        if right.dim() == 3:
            out = torch.full((left.shape[0], right.shape[2]), torch.nan)
            for i, (start, end) in enumerate(parts):
                out[start:end] = (a[start:end] @ b[i]) * left_scale[start:end, None] * right_scale[i]
            return out
        out = torch.full((len(parts), left.shape[0], right.shape[1]), torch.nan)
        scales = zip(left_scale.view(len(parts), -1), right_scale.view(len(parts), -1), strict=True)
        for i, ((start, end), (s, t)) in enumerate(zip(parts, scales, strict=True)):
            if end > start:
                out[i] = (a[:, start:end] @ b[start:end]) * s[:, None] * t
        return out

    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    return seen


@pytest.mark.parametrize("units", [(1, 0, 2), (0, 0, 0), (0, 3, 0)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_row_wise_operands_are_the_emulation_s(
    units: tuple[int, ...], power_of_two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = FP8Rowwise(backend="hardware", power_of_two=power_of_two)
    state, cuts = recipe.emulation(), offsets(recipe, *units)
    used, rows = int(cuts[-1]), int(cuts[-1]) + 16
    x, dy, w = normal(rows, 48), normal(rows, 32, seed=1), normal(3, 48, 32, seed=2)
    x[used:], dy[used:] = torch.nan, torch.nan
    x_row, x_column = (state.activation(x, cuts, along=a) for a in ("row", "column"))
    dy_row, dy_column = (state.gradient(dy, cuts, along=a) for a in ("row", "column"))
    w_in, w_out = (state.weight(w, along=a) for a in WEIGHTS)
    seen = calls(monkeypatch)
    y, dx = rowwise_forward(state, x, w, cuts), rowwise_dgrad(state, dy, w, cuts)
    dw = rowwise_wgrad(state, x, dy, cuts)
    assert all(a.dtype == b.dtype == E4M3.dtype for a, b, *_ in seen)
    for (a, b, s, t, _), (left, right) in zip(seen[:2], ((x_row, w_in), (dy_row, w_out.mT)), strict=True):
        assert torch.equal(a.float() * s[:, None], left)
        assert torch.equal(b.float() * t[:, None], right)
    a, b, s, t, ends = seen[2]
    assert ends.dtype == torch.int32
    owner = torch.searchsorted(ends, torch.arange(used, dtype=torch.int32), right=True)
    assert torch.equal((a.float().t()[:used] * s.view(3, -1)[owner]), x_column[:used])
    assert torch.equal((b.float()[:used] * t.view(3, -1)[owner]), dy_column[:used])
    for i, (start, end) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
        close: Callable[..., None] = torch.testing.assert_close
        close(y[start:end], x_row[start:end] @ w_in[i], rtol=1e-5, atol=1e-4)
        close(dx[start:end], dy_row[start:end] @ w_out[i].t(), rtol=1e-5, atol=1e-4)
        close(dw[i], x_column[start:end].t() @ dy_column[start:end], rtol=1e-5, atol=1e-4)
    assert not y[used:].any()
    assert not dx[used:].any()


@pytest.mark.parametrize("rows", [16, 64])
def test_torch_s_own_checks_take_the_row_wise_calls(rows: int) -> None:
    state = FP8Rowwise(backend="hardware").emulation()
    x, dy, w = (torch.empty(*s, device="meta") for s in ((rows, 48), (rows, 32), (3, 48, 32)))
    cuts = torch.empty(4, dtype=torch.int64, device="meta")
    for out, shape in (
        (rowwise_forward(state, x, w, cuts), (rows, 32)),
        (rowwise_dgrad(state, dy, w, cuts), (rows, 48)),
        (rowwise_wgrad(state, x, dy, cuts), (3, 48, 32)),
    ):
        assert (out.shape, out.dtype) == (shape, torch.bfloat16)
