"""Rounding to a format: the nearest, every value it holds, ties, subnormals, saturation, what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers.recipe_bounds import relative_error, step, unit
from trimtab.experts.recipes.numbers import E2M1, E4M3, E5M2, ElementFormat, encode, power_of_two, round_to

FORMATS = (E4M3, E5M2, E2M1)
ONE = torch.ones(())
BYTES = torch.arange(256).to(torch.uint8)
EVERY_BF16 = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).float()


def held(form: ElementFormat) -> Tensor:
    """Every finite value of a format, sorted, once."""
    if form is E2M1:  # OCP MX v1.0, section 5.3
        positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        return torch.cat((-positive[1:].flip(0), positive))
    values = BYTES.view(form.dtype).float()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_constants_are_those_of_the_values(form: ElementFormat) -> None:
    values = held(form)
    positive = values[values > 0]
    assert len(values) == {"E4M3": 253, "E5M2": 247, "E2M1": 15}[form.name]
    assert values.max() == form.largest
    assert positive.min() == step(form)
    if form is not E2M1:
        info = torch.finfo(form.dtype)
        assert (info.max, info.smallest_normal) == (form.largest, 2.0**form.min_exponent)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_every_value_maps_to_itself(form: ElementFormat) -> None:
    assert torch.equal(round_to(held(form), form), held(form))
    zeros = round_to(torch.tensor([0.0, -0.0]), form)
    assert torch.equal(zeros.signbit(), torch.tensor([False, True]))


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_goes_to_the_nearest_value_and_from_a_tie_to_the_even_one(form: ElementFormat) -> None:
    g = torch.Generator().manual_seed(0)
    spread = torch.randn(200_000, generator=g) * power_of_two(torch.randint(-24, 18, (200_000,), generator=g))
    values = held(form)
    between = (values[1:] + values[:-1]) / 2  # the ties, exact in float32
    near = torch.cat((between, between.nextafter(between + 1), between.nextafter(between - 1)))
    for x in (EVERY_BF16[EVERY_BF16.isfinite()], spread, near):
        x = x.clamp(-form.largest, form.largest)
        ours, above = round_to(x, form), torch.bucketize(x, between)
        tie = (x == between[above.clamp(max=len(between) - 1)]) & ((above - len(values) // 2) % 2 == 1)
        assert torch.equal(ours, values[above + tie.long()])
        assert torch.equal(ours.signbit(), x.signbit())


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_saturates_and_keeps_what_is_not_finite_visible(form: ElementFormat) -> None:
    big = torch.tensor([form.largest * 1.01, form.largest * 1.5, 3e38])
    for x in (big, -big):
        assert torch.equal(encode(x, ONE, form), x.sign() * form.largest)
        assert torch.equal(encode(x, torch.tensor(2.0**100), form), x.sign() * form.largest)
    odd = encode(torch.tensor([torch.nan, torch.inf, -torch.inf]), ONE, form)
    assert odd[0].isnan()
    if form.has_inf:
        assert odd[1:].tolist() == [math.inf, -math.inf]
    else:
        assert odd[1:].isnan().all()


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_relative_error_is_met_at_the_first_tie_and_never_exceeded(form: ElementFormat) -> None:
    tie = torch.tensor(1 + unit(form))
    assert abs(round_to(tie, form) - tie).item() == pytest.approx(relative_error(form) * tie.item())
    g = torch.Generator().manual_seed(1)
    x = (torch.rand(100_000, generator=g).double() * math.log(form.largest)).exp().float()
    assert ((round_to(x, form) - x).abs() <= relative_error(form) * x * (1 + 1e-6)).all()
    low = torch.rand(100_000, generator=g) * 2.0**form.min_exponent
    assert ((round_to(low, form) - low).abs() <= step(form) / 2).all()


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(form: ElementFormat) -> None:
    values = held(form)
    noise = torch.rand(len(values), generator=torch.Generator().manual_seed(2))
    for n in (noise, torch.zeros_like(noise)):
        assert torch.equal(round_to(values, form, n), values)
    g = torch.Generator().manual_seed(3)
    for x in (1.1, -2.9, 0.3 * step(form), -0.9 * step(form), form.largest * 0.99):
        rounded = round_to(torch.full((40_000,), x), form, torch.rand(40_000, generator=g))
        neighbours = rounded.unique()
        assert len(neighbours) == 2
        assert neighbours[0] < x < neighbours[1]
        assert not ((values > neighbours[0]) & (values < neighbours[1])).any()
        gap = (neighbours[1] - neighbours[0]).item()
        assert abs(rounded.double().mean().item() - x) < 4 * gap / 2 / 200  # four standard deviations at most


def test_powers_of_two_are_those_of_e8m0() -> None:
    exponents = torch.arange(-127, 128)
    assert torch.equal(power_of_two(exponents), BYTES[:255].view(torch.float8_e8m0fnu).float())
    assert torch.equal(power_of_two(torch.tensor([-300, 300])), torch.tensor([2.0**-127, 2.0**127]))
