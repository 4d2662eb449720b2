"""Products of few rows, in whichever form they are computed, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from comparing import assert_close
from trimtab.kernels import few_rows
from trimtab.kernels.few_rows import few_rows_mm
from trimtab.kernels.pages import Pages

ROWS = (0, 1, 16, 37, few_rows.TURNED, few_rows.TURNED + 1, few_rows.APART, few_rows.APART + 1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("a", "b"), [(300, 1024), (1000, 1100), (512, 2048), (8, 24), (0, 1024), (1, 1)])
def test_the_product_is_the_same_in_every_form(a: int, b: int, turned: bool, dtype: torch.dtype) -> None:
    pages = Pages()
    w = torch.randn(b, a).to(dtype).t() if turned else torch.randn(a, b).to(dtype)
    for rows in ROWS:
        x, wide = torch.randn(rows, a).to(dtype), torch.full((rows, b + 3), float("nan"), dtype=dtype)
        truth = x.double() @ w.double()
        for out in (wide[:, :b], torch.full((rows, b), float("nan"), dtype=dtype)):
            assert few_rows_mm(x, w, out, pages) is out
            assert_close(out, truth, {torch.bfloat16: 2e-2, torch.float32: 2e-6}.get(dtype, 1e-13), "product")
        assert torch.isnan(wide[:, b:]).all()


def test_rows_that_fill_up_a_register_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product with leftovers of memory would be slow where they are denormal, and warn where they are NaN."""
    seen: list[torch.Tensor] = []
    real = torch.addmm

    def addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int, out: torch.Tensor) -> torch.Tensor:
        seen.append(b.clone())
        return real(c, a, b, beta=beta, out=out)

    monkeypatch.setattr(torch, "addmm", addmm)
    pages = Pages()
    for _ in range(2):  # the second time in memory that was used
        big = pages.empty(4096, 48, dtype=torch.float32).fill_(float("nan"))
        del big
        few_rows_mm(torch.randn(37, 4096), torch.randn(300, 4096).t(), torch.empty(37, 300), pages)
    assert sum(len(b) for b in seen) == 2 * 4096
    assert {b.shape[1] for b in seen} == {48}
    assert all((b[:, 37:] == 0).all() for b in seen)


@pytest.mark.parametrize("a", [200, 512, 768, 769, 1000, 1152, 1153, 2816])
def test_a_row_has_the_bits_that_it_has_among_many(a: int) -> None:
    w, x = torch.randn(1_100_000 // a, a).t(), torch.randn(600, a)
    many = few_rows_mm(x, w, torch.empty(600, w.shape[1]), Pages())
    for rows in (16, 37, few_rows.TURNED, few_rows.TURNED + 1):
        few = few_rows_mm(x[:rows], w, torch.empty(rows, w.shape[1]), Pages())
        assert torch.equal(few, many[:rows]), f"{rows} rows"


@pytest.mark.parametrize(("a", "b"), [(512, 1024), (768, 1024), (1024, 1024)])
def test_a_row_has_the_bits_that_it_has_among_as_few(a: int, b: int) -> None:
    w, x = torch.randn(a, b), torch.randn(few_rows.APART, a)
    many = few_rows_mm(x, w, torch.empty(few_rows.APART, b), Pages())
    for rows in (32, 64, 100, few_rows.APART):
        assert torch.equal(few_rows_mm(x[:rows], w, torch.empty(rows, b), Pages()), many[:rows]), f"{rows} rows"
