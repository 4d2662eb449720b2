"""Products of few rows, in whichever form they are computed, against float64."""

from __future__ import annotations

import pytest
import torch

from comparing import assert_close
from trimtab.kernels import few_rows
from trimtab.kernels.few_rows import few_rows_mm
from trimtab.kernels.pages import Pages

ROWS = (0, 1, 16, 37, few_rows.TURNED, few_rows.TURNED + 1, few_rows.APART, few_rows.APART + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("a", "b"), [(300, 1024), (1024, 300), (512, 512), (8, 24), (0, 1024), (1, 1)])
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
    real = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append(b.clone())
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    pages = Pages()
    for _ in range(2):  # the second time in memory that was used
        big = pages.empty(4096, 48, dtype=torch.float32).fill_(float("nan"))
        del big
        few_rows_mm(torch.randn(37, 4096), torch.randn(100, 4096).t(), torch.empty(37, 100), pages)
    assert [tuple(b.shape) for b in seen] == [(4096, 48)] * 2
    assert all((b[:, 37:] == 0).all() for b in seen)
