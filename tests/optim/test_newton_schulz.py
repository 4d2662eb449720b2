"""Newton-Schulz: torch's bits, Gram's form within rounding of it, safe where it says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from trimtab.optim import KELLER, POLAR_EXPRESS, gram, plain
from trimtab.optim.newton_schulz import Coefficients

SPECTRA = {"flat": 0.0, "to 1e-3": -3.0, "to 1e-6": -6.0}


def drawn(rows: int, columns: int, decades: float, seed: int = 0) -> Tensor:
    """A matrix whose singular values go down by so many powers of ten."""
    draw = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(rows, columns, generator=draw, dtype=torch.float64), full_matrices=False)
    return (u * torch.logspace(0, decades, min(rows, columns), dtype=torch.float64)) @ v


@pytest.mark.parametrize(("rows", "columns"), [(24, 56), (56, 24), (40, 40)])
def test_plain_has_torchs_bits_for_each_matrix_of_a_batch(rows: int, columns: int) -> None:
    torch.set_num_threads(1)
    x = torch.randn(5, rows, columns)
    before = x.clone()
    each = [_zeropower_via_newtonschulz(matrix, KELLER[0], 5, 1e-7) for matrix in x]
    assert torch.equal(plain(x), torch.stack(each))
    assert torch.equal(plain(x[:2].mT.contiguous().mT), torch.stack(each[:2]))
    assert torch.equal(x, before)


@pytest.mark.parametrize("coefficients", [KELLER, POLAR_EXPRESS, KELLER[:2]])
@pytest.mark.parametrize("restarts", [(), (2,), (1, 3)])
def test_gram_computes_the_same(coefficients: Coefficients, restarts: tuple[int, ...]) -> None:
    restarts = tuple(step for step in restarts if step < len(coefficients))
    for shape in ((48, 24), (24, 48)):
        x = torch.stack([drawn(*shape, -2.0, seed) for seed in range(3)])
        truth = plain(x, coefficients, torch.float64)
        assert (gram(x, coefficients, torch.float64, restarts) - truth).norm() <= 1e-8 * truth.norm()
        assert (gram(x, coefficients, torch.float32, restarts) - truth).norm() <= 1e-3 * truth.norm()


@pytest.mark.parametrize("coefficients", [KELLER, POLAR_EXPRESS])
@pytest.mark.parametrize("decades", SPECTRA.values(), ids=SPECTRA)
def test_singular_values_end_near_one_in_bfloat16(decades: float, coefficients: Coefficients) -> None:
    x = drawn(96, 256, decades)[None]
    for form in (plain, gram):
        assert torch.linalg.svdvals(form(x, coefficients).double()).max() <= 1.4
    exact = torch.linalg.svdvals(gram(x, coefficients, torch.float64))
    assert exact.min() >= (0.65 if decades == 0 else 0)


def test_gram_without_a_restart_is_not_safe_in_bfloat16() -> None:
    x = drawn(96, 256, -6.0)[None]
    assert torch.linalg.svdvals(gram(x, POLAR_EXPRESS, restarts=()).double()).max() > 10


@pytest.mark.parametrize("form", [plain, gram])
def test_zeros_give_zeros_and_no_matrices_none(form: type) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert not form(torch.zeros(2, 8, 16), KELLER, dtype).any()
        assert form(torch.zeros(0, 8, 16), KELLER, dtype).shape == (0, 8, 16)
