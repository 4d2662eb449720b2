"""What every recipe promises of its state: shapes, segments, padding, what is not finite, devices, invariances."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.recipe_bounds import block_of, element_bound
from helpers.recipe_cases import KINDS, METHODS, NAMES, RECIPES, WEIGHTS, normal, offsets, rows_of
from trimtab.errors import InputError
from trimtab.experts.module import ExpertMLP

C = 40  # not a multiple of any block


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("method", METHODS, ids="-".join)
@pytest.mark.parametrize("name", KINDS)
def test_padding_is_zero_and_influences_nothing(name: str, method: tuple[str, str]) -> None:
    recipe = RECIPES[name]
    cuts = offsets(recipe, 1, 0, 2)
    used = int(cuts[-1])
    x = normal(used + 37, C)
    plain = rows_of(recipe, x[:used], cuts, method)
    for poison in (torch.nan, torch.inf, 1e30):
        x[used:] = poison
        out = rows_of(recipe, x, cuts, method)
        assert out.dtype == torch.float32
        assert out.shape == x.shape
        assert not out[used:].any()
        assert torch.equal(out[:used], plain)


@pytest.mark.parametrize("method", METHODS, ids="-".join)
@pytest.mark.parametrize("name", KINDS)
def test_a_segment_is_what_it_would_be_alone(name: str, method: tuple[str, str]) -> None:
    recipe = RECIPES[name]
    if name.startswith("nvfp4") and name != "nvfp4_nearest" and method[0] == "gradient":
        recipe = RECIPES["nvfp4_nearest"]  # the noise of an element depends on its place
    cuts = offsets(recipe, 0, 1, 0, 2, 0)
    x = normal(int(cuts[-1]), C)
    whole = rows_of(recipe, x, cuts, method)
    for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        alone = rows_of(recipe, x[start:end], torch.tensor([0, end - start]), method)
        assert torch.equal(whole[start:end], alone)


@pytest.mark.parametrize("name", KINDS)
def test_zeros_give_zeros(name: str) -> None:
    recipe = RECIPES[name]
    cuts = offsets(recipe, 1, 1)
    for method in METHODS:
        assert not rows_of(recipe, torch.zeros(int(cuts[-1]), C), cuts, method).any()
    for along in WEIGHTS:
        assert not recipe.state().weight(torch.zeros(2, C, 24), along=along).any()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_place_and_nowhere_else(name: str, odd: float) -> None:
    recipe = RECIPES[name]
    cuts = offsets(recipe, 1, 1)
    x = normal(int(cuts[-1]), C)
    x[3, 5] = 0
    y = x.clone()
    y[3, 5] = odd
    for method in METHODS:
        clean, shown = rows_of(recipe, x, cuts, method), rows_of(recipe, y, cuts, method)
        assert not shown[3, 5].isfinite()
        shown[3, 5] = 0
        assert torch.equal(clean, shown)
    w = normal(2, C, 24)
    w[1, 2, 3] = odd
    for along in WEIGHTS:
        bad = ~recipe.state().weight(w, along=along).isfinite()
        assert bad.nonzero().tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("name", KINDS)
def test_runs_on_the_meta_device_with_a_state_from_anywhere(name: str) -> None:
    recipe = RECIPES[name]
    cuts = torch.empty(4, dtype=torch.int64, device="meta")
    state = recipe.state()
    for (method, along), weight_along in zip(METHODS[::3], WEIGHTS, strict=True):
        x = torch.empty(300, C, device="meta", dtype=torch.bfloat16)
        out = getattr(state, method)(x, cuts, along=along)
        assert (out.shape, out.dtype, out.device.type) == (x.shape, torch.float32, "meta")
        assert state.weight(torch.empty(3, C, 24, device="meta"), along=weight_along).shape == (3, C, 24)
        state = state.to("meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_narrow_inputs_are_quantised_from_their_exact_values(name: str, dtype: torch.dtype) -> None:
    recipe = RECIPES[name]
    cuts = offsets(recipe, 2, 1)
    x, w = normal(int(cuts[-1]), C, dtype=dtype), normal(2, C, 24, dtype=dtype)
    for method in METHODS:
        assert torch.equal(rows_of(recipe, x, cuts, method), rows_of(recipe, x.float(), cuts.int(), method))
    for along in WEIGHTS:
        state = recipe.state()
        strided = w.mT.contiguous().mT
        assert torch.equal(state.weight(strided, along=along), recipe.state().weight(w.float(), along=along))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(NAMES), st.sampled_from(METHODS), st.integers(-30, 30), st.integers(0, 99))
def test_powers_of_two_pass_through(name: str, method: tuple[str, str], exponent: int, seed: int) -> None:
    recipe = RECIPES[name]
    cuts = offsets(recipe, 1, 0, 1)
    x = normal(int(cuts[-1]), C, seed=seed)
    scaled = rows_of(recipe, x * 2.0**exponent, cuts, method)
    assert torch.equal(scaled, rows_of(recipe, x, cuts, method) * 2.0**exponent)


POWER_OF_TWO = [n for n in NAMES if n in ("fp8_rowwise_pow2", "fp8_blockwise") or n.startswith("mxfp8")]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(POWER_OF_TWO), st.sampled_from(METHODS), st.integers(0, 99), st.floats(0.5, 2.0, width=32))
def test_quantising_twice_changes_nothing_where_scales_are_powers_of_two(
    name: str, method: tuple[str, str], seed: int, factor: float
) -> None:
    recipe = RECIPES[name]
    cuts = offsets(recipe, 1, 2)
    x = normal(int(cuts[-1]), C, seed=seed) * factor
    x *= torch.logspace(-6, 6, C, 2.0)
    once = rows_of(recipe, x, cuts, method)
    assert torch.equal(rows_of(recipe, once, cuts, method), once)


def largest_per_block(x: Tensor, rows: int, columns: int) -> Tensor:
    """max |x| over what each element of the last two axes shares its scale with, by slicing."""
    bands = [band.split(columns, -1) for band in x.abs().split(rows, -2)]
    return torch.cat([torch.cat([b.amax((-2, -1), True).expand_as(b) for b in band], -1) for band in bands], -2)


@pytest.mark.parametrize("method", METHODS, ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_each_element_is_within_its_bound(name: str, method: tuple[str, str]) -> None:
    recipe = RECIPES[name]
    bound = element_bound(recipe, method[0])
    rows = 2 * recipe.alignment
    x = normal(rows, 200, seed=4) * torch.logspace(-40, 40, 200, 2.0 if method[1] == "row" else 1.1)
    x *= torch.logspace(-8, 8, rows, 2.0)[:, None]
    q = rows_of(recipe, x, torch.tensor([0, rows]), method)
    amax = largest_per_block(x, *block_of(recipe, *method))
    allowed = torch.maximum(bound.relative * x.abs(), bound.block_floor * amax) + bound.tensor_floor * x.abs().max()
    worst = ((q - x).abs() / (allowed * (1 + 1e-6))).max().item()
    assert worst <= 1
    assert worst > 0.8  # and the bound is no more than it has to be


@pytest.mark.parametrize("along", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_each_weight_is_within_its_bound(name: str, along: Literal["in", "out"]) -> None:
    recipe = RECIPES[name]
    bound = element_bound(recipe, "weight")
    w = normal(2, 200, 144, seed=5) * torch.logspace(-12, 12, 144, 2.0) * torch.logspace(-8, 8, 200, 2.0)[:, None]
    q = recipe.state().weight(w, along=along)
    amax = largest_per_block(w, *block_of(recipe, "weight", along))
    tensor = w.abs().amax((1, 2), keepdim=True)
    allowed = torch.maximum(bound.relative * w.abs(), bound.block_floor * amax) + bound.tensor_floor * tensor
    worst = ((q - w).abs() / (allowed * (1 + 1e-6))).max().item()
    assert 0.8 < worst <= 1


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_checkpoint_without_the_recipe_loads(name: str) -> None:
    plain = ExpertMLP(4, 64, 32)
    low = ExpertMLP(4, 64, 32, recipe=RECIPES[name])
    fresh = {key: value.clone() for key, value in low.state_dict().items() if "_state." in key}
    assert low.load_state_dict(plain.state_dict()) == ([], [])
    assert torch.equal(low.gate_up, plain.gate_up)
    kept = low.state_dict()
    assert all(torch.equal(kept[key], value) for key, value in fresh.items())
    for half in ("noise.calls", "noise.key"):
        missing = {key: value for key, value in kept.items() if not key.endswith(half)}
        if missing.keys() != kept.keys():
            with pytest.raises(RuntimeError, match="Missing key"):
                low.load_state_dict(missing)


def test_what_does_not_fit_is_refused() -> None:
    state = RECIPES["mxfp8"].state()
    x, cuts = normal(64, C), torch.tensor([0, 64])
    with pytest.raises(InputError, match=r"activation of shape \(64, 40\), along='rows': need 2 axes, one of"):
        state.activation(x, cuts, along="rows")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"weight .* along='row'"):
        state.weight(normal(1, 8, 8), along="row")
    with pytest.raises(InputError, match=r"weight of shape .* need 3 axes"):
        state.weight(x, along="in")
