"""Products of rows and a weight, in whichever form they are computed, against float64, and the bits of a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from helpers.comparing import assert_close
from helpers.threads import torch_threads
from trimtab.kernels import mkl
from trimtab.kernels.mkl import rows_mm
from trimtab.kernels.pages import Pages

EDGES = (mkl.REGISTER, mkl.BESIDE, mkl.BESIDE + 1, mkl.TURNED, mkl.TURNED + 1)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with torch_threads(request.param):
        yield request.param


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("threads", "dtype"), [(1, torch.float32), (2, torch.float32), (1, torch.float64), (1, torch.bfloat16)],
    indirect=["threads"],
)  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("a", "b"), [(300, 1024), (1000, 1100), (512, 2048), (8, 24), (0, 1024), (1, 1)])
def test_the_product_is_the_same_in_every_form(
    a: int, b: int, turned: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkl, "_measured", lambda: True)
    pages = Pages()
    w = torch.randn(b, a).to(dtype).t() if turned else torch.randn(a, b).to(dtype)
    for rows in (0, 1, 37, 200, *EDGES):
        x, wide = torch.randn(rows, a).to(dtype), torch.full((rows, b + 3), float("nan"), dtype=dtype)
        truth = x.double() @ w.double()
        for out in (wide[:, :b], torch.full((rows, b), float("nan"), dtype=dtype)):
            assert rows_mm(x, w, out, pages) is out
            assert_close(out, truth, {torch.bfloat16: 2e-2, torch.float32: 2e-6}.get(dtype, 1e-13), "product")
        assert torch.isnan(wide[:, b:]).all()


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.usefixtures("threads")
def test_rows_that_fill_up_a_register_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product with leftovers of memory would be slow where they are denormal, and warn where they are NaN."""
    seen: list[torch.Tensor] = []
    real = torch.addmm

    def addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int, out: torch.Tensor) -> torch.Tensor:
        seen.append(b.clone())
        return real(c, a, b, beta=beta, out=out)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(mkl, "_measured", lambda: True)
    pages = Pages()
    for _ in range(2):  # the second time in memory that was used
        big = pages.empty(4096, 48, dtype=torch.float32).fill_(float("nan"))
        del big
        rows_mm(torch.randn(37, 4096), torch.randn(300, 4096).t(), torch.empty(37, 300), pages)
    assert sum(len(b) for b in seen) == 2 * 4096
    assert {b.shape[1] for b in seen} == {48}
    assert all((b[:, 37:] == 0).all() for b in seen)


@pytest.mark.skipif(not mkl._measured(), reason="the forms are for MKL's kernels for AVX-512")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("as_compiled", [False, True])
@pytest.mark.parametrize(
    ("a", "b"),
    [(512, 2048), (769, 1400), (1025, 1024), (1152, 600), (2816, 1024), (1024, 2816), (4096, 128), (8192, 64)],
)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    a: int, b: int, turned: bool, as_compiled: bool
) -> None:
    w = torch.randn(b, a).t() if turned else torch.randn(a, b)
    x, truth = torch.randn(400, a), {}
    for threads in (1, 2):
        with torch_threads(threads):
            truth[threads] = rows_mm(x, w, torch.empty(400, b), Pages(), as_compiled=as_compiled)
            few = (1, 2) if as_compiled else () if turned else (2, 7)
            for rows in (*few, 16, 17, 37, 100, 191, 192, 300, *EDGES):
                got = rows_mm(x[:rows], w, torch.empty(rows, b), Pages(), as_compiled=as_compiled)
                assert torch.equal(got, truth[threads][:rows]), f"{rows} rows, {threads} threads"
    if not (turned and a > 2 * mkl.DEPTH and a % mkl.DEPTH == 1):
        assert torch.equal(truth[1], truth[2])


@pytest.mark.skipif(not mkl._measured(), reason="the forms are for MKL's kernels for AVX-512")
@pytest.mark.parametrize(
    ("threads", "a", "b"),
    [(1, 8192, 64), (2, 4096, 256), (2, 2816, 1024), (3, 1024, 1024), (8, 2816, 1024), (16, 1536, 2048)],
)
def test_many_threads_and_narrow_products_have_the_bits_of_one_thread_s_steps(threads: int, a: int, b: int) -> None:
    assert b >= mkl.NARROW * threads or threads == 1
    w, x = torch.randn(b, a).t(), torch.randn(70, a)
    with torch_threads(1):
        truth = mkl._in_steps(x, w, torch.empty(70, b), mkl.DEPTH)
    with torch_threads(threads):
        for rows, as_compiled in itertools.product((16, 40, 63, 70), (False, True)):
            got = rows_mm(x[:rows], w, torch.empty(rows, b), Pages(), as_compiled=as_compiled)
            assert torch.equal(got, truth[:rows]), f"{rows} rows"


def test_the_forms_are_for_processors_on_which_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for vendor, measured, slower in (("GenuineIntel", True, False), ("AuthenticAMD", False, True), ("", False, False)):
        monkeypatch.setattr(mkl, "_vendor", lambda vendor=vendor: vendor)
        assert mkl._measured() == (measured and torch._C.has_mkl)
        assert mkl.slower_than_compiled() == slower


def test_each_form_is_taken_where_it_is_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(mkl, "_measured", lambda: True)
    for name in ("_in_steps", "_turned", "_side_by_side"):
        real = getattr(mkl, name)
        monkeypatch.setattr(mkl, name, lambda *args, n=name, f=real: (taken.append(f"{n} {args[3]}"), f(*args))[1])

    def of(rows: int, w: torch.Tensor, threads: int, **how: bool) -> str:
        taken.clear()
        with torch_threads(threads):
            rows_mm(torch.randn(rows, w.shape[0]), w, torch.empty(rows, w.shape[1]), Pages(), **how)
        return taken[0] if taken else "mm"

    apart, near = torch.randn(1100, 1024), torch.randn(1100, 600)
    assert {of(rows, apart, threads) for rows in (20, 300) for threads in (1, 2)} == {"_in_steps 128"}
    assert {of(rows, near, threads) for rows in (20, 300) for threads in (1, 2)} == {"_in_steps 512"}
    assert {of(rows, apart, threads, as_compiled=True) for rows in (20, 300) for threads in (1, 2)} == {"_in_steps 384"}
    assert of(300, torch.randn(1024, 700).t(), 1, as_compiled=True) == "_in_steps 384"
    assert of(300, apart.t(), 1, as_compiled=True) == "mm"
    assert of(80, torch.randn(1024, 1100).t(), 1) == "_turned 384"
    assert of(81, torch.randn(1024, 1100).t(), 1) == of(20, torch.randn(600, 700).t(), 1) == "mm"
    assert of(63, torch.randn(600, 700).t(), 2) == of(16, torch.randn(700, 700).t(), 6) == "_side_by_side 2"
    assert of(64, torch.randn(600, 700).t(), 2) == of(8, torch.randn(600, 700).t(), 2) == "_in_steps 700"
    assert of(64, torch.randn(600, 1100).t(), 2) == of(20, torch.randn(601, 1100).t(), 2) == "_in_steps 384"
