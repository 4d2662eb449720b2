"""Block scales exactly as specified, against scalar arithmetic in Python; which elements share one; what is stored."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.experts.recipes import NVFP4, numbers

POSITIVE = st.floats(2.0**-126, 2.0**127, width=32)
EIGHT_BITS = st.sampled_from([numbers.E4M3, numbers.E5M2])
EMAX = {"E4M3": 8, "E5M2": 15}  # OCP MX v1.0, section 5.3


@settings(deadline=None)
@given(POSITIVE, EIGHT_BITS)
def test_mx_floor_is_the_specification(amax: float, form: numbers.ElementFormat) -> None:
    exponent = math.frexp(amax)[1] - 1 - EMAX[form.name]
    scale = numbers.e8m0_scale(torch.tensor(amax), form)
    assert scale.decode.item() == 2.0 ** max(exponent, -127)
    assert scale.decode.to(torch.float8_e8m0fnu).float().item() == scale.decode.item()  # one byte holds it
    assert scale.decode.double() * scale.encode.double() == 1


@settings(deadline=None)
@given(POSITIVE, EIGHT_BITS)
def test_mx_ceil_is_the_least_power_of_two_that_does_not_saturate(amax: float, form: numbers.ElementFormat) -> None:
    decode = Fraction(numbers.e8m0_scale(torch.tensor(amax), form, ceil=True).decode.item())
    assert Fraction(amax) <= decode * Fraction(form.largest)
    assert decode == Fraction(2) ** -127 or Fraction(amax) > decode / 2 * Fraction(form.largest)


@settings(deadline=None)
@given(POSITIVE, EIGHT_BITS, st.integers(0, 11))
def test_float_scale_puts_amax_at_the_largest_value(amax: float, form: numbers.ElementFormat, margin: int) -> None:
    scale = numbers.float_scale(torch.tensor(amax), form, margin=margin)
    exact = form.largest / min(2.0**margin * amax, 2.0**128)
    assert scale.encode.item() == pytest.approx(min(exact, 2.0**126), rel=2**-22)
    assert scale.decode.item() == pytest.approx(1 / scale.encode.item(), rel=2**-23)
    power = numbers.float_scale(torch.tensor(amax), form, margin=margin, exact=True).encode.item()
    assert math.frexp(power)[0] == 0.5
    assert power <= scale.encode.item() < 2 * power


@pytest.mark.parametrize("exponent", range(-149, -90, 7))
def test_nvfp4_makes_no_nan_of_the_smallest_values(exponent: int) -> None:
    x = torch.zeros(16, 32)
    x[0, 0], x[3, 17] = 2.0**exponent, -(2.0**exponent)
    for beside in (0.0, 2.0 ** (exponent + 20)):
        x[8, 8] = beside
        state = NVFP4(backend="emulated", seed=1).state()
        for low in (state.activation(x, torch.tensor([0, 16]), along="row"), state.weight(x[None], along="in")):
            assert low.isfinite().all()


@pytest.mark.parametrize("form", [numbers.E4M3, numbers.E5M2], ids=lambda f: f.name)
def test_all_zero_blocks_have_a_finite_scale(form: numbers.ElementFormat) -> None:
    zero = torch.zeros(3)
    for scale, wanted in ((numbers.float_scale(zero, form), 1.0), (numbers.e8m0_scale(zero, form), 2.0**-127)):
        assert torch.equal(scale.decode, torch.full((3,), wanted))
        assert torch.equal(zero * scale.encode, zero)
    assert torch.equal(numbers.tensor_scale(zero), torch.ones(3))
    scale = numbers.e4m3_scale(zero, torch.ones(3))
    assert not scale.stored.any()
    assert not scale.encode.any()


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e4, width=32), min_size=1, max_size=8))
def test_nvfp4_scales_are_the_two_levels_of_its_paper(amaxes: list[float]) -> None:
    amax = torch.tensor(amaxes)
    g = numbers.tensor_scale(amax.max())
    scale = numbers.e4m3_scale(amax, g)
    stored = scale.stored
    assert torch.equal(stored.to(torch.float8_e4m3fn).float(), stored)
    assert (stored <= 448).all()
    if amax.max() > 1e-30:
        wanted = (amax.double() / 6) / (amax.max().double() / (6 * 448))
        assert ((stored - wanted).abs() <= wanted / 17 * (1 + 1e-6) + 2.0**-10).all()
        assert stored[amax.argmax()] == 448
    assert torch.equal(scale.decode, stored * g)
    reached = numbers.round_to(amax * scale.encode, numbers.E2M1)
    assert (reached <= 6).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (4, 1), (4, 4), (1, 7), (5, 7), (16, 1)])
def test_blocks_are_rectangles_from_the_first_corner(rows: int, columns: int) -> None:
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    blocks = numbers.Blocks(x, rows, columns, None)
    amax = blocks.amax()
    for i in range(amax.shape[1]):
        for j in range(amax.shape[2]):
            part = x[:, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert torch.equal(amax[:, i, j], part.abs().amax((1, 2)))
    spread = blocks.spread(amax).expand_as(x)
    assert spread.shape == x.shape
    assert (spread >= x.abs()).all()
    assert torch.equal(spread[:, 4, 6], amax[:, 4 // rows, 6 // columns])


@pytest.mark.parametrize("cuts", [(0, 16, 48), (0, 0, 32), (0, 32, 32), (0, 0, 0), (0, 16, 16, 16, 80), (0, 80)])
def test_segments_against_a_loop(cuts: tuple[int, ...]) -> None:
    x = torch.randn(80, 3, generator=torch.Generator().manual_seed(1))
    x[cuts[-1] :] = torch.nan
    offsets = torch.tensor(cuts)
    by_column, whole = (numbers.Blocks(x, 0, columns, offsets) for columns in (1, 0))
    clean = by_column.x
    parts = [clean[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]

    def largest(part: Tensor) -> Tensor:
        return part.abs().amax(0) if len(part) else torch.zeros(3)

    assert not clean[cuts[-1] :].any()
    assert torch.equal(by_column.amax(), torch.stack([largest(p) for p in parts]))
    assert torch.equal(whole.amax()[:, 0], torch.stack([largest(p).max() for p in parts]))
    spread = whole.spread(torch.arange(len(parts))[:, None])[: cuts[-1], 0].tolist()
    assert spread == [i for i, p in enumerate(parts) for _ in p]
    by_16 = numbers.Blocks(x, 16, 1, offsets)
    of_blocks = by_16.tensor_amax(by_16.amax())[: cuts[-1] // 16, 0]
    assert torch.equal(of_blocks, torch.tensor([largest(p).max() for p in parts for _ in p[::16]]))
