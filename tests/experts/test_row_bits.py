"""Which bits depend on what, of the compiled expert MLP: a row's on that row alone, on no number of threads; of
products of bfloat16 as well."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from experts.test_shapes import kernels_of
from helpers.emulated import INSTRUCTIONS
from helpers.pair_truth import INTERLEAVED
from helpers.threads import torch_threads
from helpers.weights import expert_weights
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.plan import plan_experts
from trimtab.kernels.compiled import CompiledKernels, compiled_kernels

pytestmark = pytest.mark.xdist_group("emulated")  # one process compiles what they share


@pytest.fixture(params=["own", *product(INSTRUCTIONS, ("emulated", "own"))], ids=str)
def kernels(request: pytest.FixtureRequest) -> CompiledKernels:
    return compiled_kernels() if request.param == "own" else kernels_of(*request.param)


E, K = 4, 2


def run(
    rows: Tensor, threads: int, dtype: torch.dtype, D: int = 80, F: int = 48, kernels: CompiledKernels | None = None
) -> dict[str, Tensor]:
    """Output and gradients of the rows numbered `rows`, each drawn by its number."""
    g = torch.Generator().manual_seed(1)
    up, down = ((torch.randn(*s, generator=g) * 0.2).to(dtype).requires_grad_() for s in ((E, 2 * F, D), (E, D, F)))
    drawn = torch.randn(1500, 2 * D + K, generator=g)[rows]
    x, dy = (t.to(dtype) for t in (drawn[:, :D], drawn[:, D : 2 * D]))
    w = drawn[:, 2 * D :].clone().requires_grad_()
    x.requires_grad_()
    ids = torch.stack((rows % 3, (rows % 3) + 1), 1)
    ids = torch.where(rows[:, None] < 1400, ids, 3)  # the last hundred make one expert hot
    with torch_threads(threads):
        plan = plan_experts(ids, E)
        y = expert_mlp(x, w, plan, *expert_weights(up=up, down=down), "swiglu", kernels or compiled_kernels())
        dx, dw, d_up, d_down = torch.autograd.grad(y, (x, w, up, down), dy)
    return {"y": y.detach(), "dx": dx, "dw": dw, "d_up": d_up, "d_down": d_down}


@pytest.mark.parametrize(("dim", "hidden"), [(80, 48), (300, 1100), (96, 64), (416, 288), (300, 260)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_depend_on_it_alone(dtype: torch.dtype, dim: int, hidden: int, kernels: CompiledKernels) -> None:
    """Expert rows from one to many: of few the weights are read where they lie, if widths are multiples of 32."""
    if dtype is torch.float32 and kernels is not compiled_kernels():
        pytest.skip("whose bits are the same on all, see below")
    everything = run(torch.arange(1500), 1, dtype, dim, hidden, kernels)
    few = [torch.arange(700 - n // 2, 700 + n // 2 + 1) for n in (2, 6, 12, 14, 22, 24, 44, 48, 70, 90, 100)]
    for rows in (torch.tensor([700]), torch.arange(693, 708), torch.arange(600, 780), torch.arange(200, 1200), *few):
        at = rows.tolist().index(700)
        part = run(rows, 1 + len(rows) % 2, dtype, dim, hidden, kernels)
        for name in ("y", "dx", "dw"):
            assert torch.equal(part[name][at], everything[name][700]), f"{name} of row 700 among {len(rows)}"


@pytest.mark.parametrize("activation", ["swiglu", INTERLEAVED])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dim", "hidden"), [(416, 64), (96, 1120), (2112, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_small_number_of_rows_has_the_bits_of_many(
    dtype: torch.dtype, dim: int, hidden: int, transposed: bool, activation: str, kernels: CompiledKernels
) -> None:
    """A weight that is read where it lies, in one round or several, and one that is brought."""
    if dtype is torch.float32 and kernels is not compiled_kernels():
        pytest.skip("whose bits are the same on all, see below")
    torch.manual_seed(0)
    up, down = torch.randn(1, 2 * hidden, dim).to(dtype), torch.randn(1, dim, hidden).to(dtype)
    weights = expert_weights(
        *(t.mT.contiguous() if transposed else t for t in (up, down)), torch.randn(1, 2 * hidden).to(dtype),
        torch.randn(1, dim).to(dtype), transposed=transposed,
    )  # fmt: skip
    x, w, dy = torch.randn(200, dim).to(dtype), torch.rand(200, 1), torch.randn(200, dim).to(dtype)

    def results(rows: int) -> list[Tensor]:
        leaves = [x[:rows].clone().requires_grad_(), w[:rows].clone().requires_grad_()]
        plan = plan_experts(torch.zeros(rows, 1, dtype=torch.int64), 1)
        y = expert_mlp(*leaves, plan, *weights, activation, kernels)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[:rows])]

    many = results(200)
    for rows in range(1, 70) if dim == 416 else (1, 2, 3, 17, 32, 33, 64, 65):
        same = [torch.equal(few, all_[:rows]) for few, all_ in zip(results(rows), many, strict=True)]
        assert same == [True] * 3, rows


def test_rows_beside_many_have_the_bits_that_they_have_alone() -> None:
    torch.manual_seed(0)
    module = ExpertMLP(2, 128, 4096, kernels="cpu", dtype=torch.float32)
    x, w, dy = torch.randn(1700, 128), torch.rand(1700, 1), torch.randn(1700, 128)
    found = []
    for rows in (40, 300, 1700):
        for threads in (1, 2):
            leaves = [x[:rows].clone().requires_grad_(), w[:rows].clone().requires_grad_()]
            with torch_threads(threads):
                y = module(leaves[0], (torch.arange(rows) >= 40).long()[:, None], leaves[1])
                y.backward(dy[:rows])
            found.append([t[:40].detach() for t in (y, leaves[0].grad, leaves[1].grad) if t is not None])
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(others, found[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_or_plain_a_row_has_its_bits_among_1_to_4096(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = ExpertMLP(2, 288, 96, kernels="cpu", dtype=dtype).requires_grad_(False)
    x, w, dy = torch.randn(4096, 288).to(dtype), torch.rand(4096, 1), torch.randn(4096, 288).to(dtype)

    def results(rows: int) -> list[Tensor]:
        leaves = [x[:rows].clone().requires_grad_(), w[:rows].clone().requires_grad_()]
        y = module(leaves[0], torch.ones(rows, 1, dtype=torch.int64), leaves[1])
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[:rows])]

    many = results(4096)
    for form in ("plain", "packed"):
        if form == "packed":
            module.quantize_(form)
        for rows in (1, 2, 3, 4, 7, 8, 9, 16, 31, 64, 65, 130, 600, 2048, 4096):
            same = [torch.equal(few, all_[:rows]) for few, all_ in zip(results(rows), many, strict=True)]
            assert same == [True] * 3, (form, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_bit_depends_on_the_number_of_threads_or_the_run(dtype: torch.dtype, kernels: CompiledKernels) -> None:
    one = run(torch.arange(1500), 1, dtype, kernels=kernels)
    for threads in (1, 2, 3, 8):
        many = run(torch.arange(1500), threads, dtype, kernels=kernels)
        assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_row_s_bits_in_large_experts_depend_on_neither_the_other_rows_nor_the_threads() -> None:
    dim, hidden = 1024, 1040
    everything = run(torch.arange(1500), 1, torch.float32, dim, hidden)
    for rows in (torch.tensor([700]), torch.arange(690, 714), torch.arange(650, 800), torch.arange(200, 1500)):
        at = rows.tolist().index(700)
        for threads in (1, 2):
            part = run(rows, threads, torch.float32, dim, hidden)
            for name in ("y", "dx", "dw"):
                same = torch.equal(part[name][at], everything[name][700])
                assert same, f"{name} of row 700 among {len(rows)}, {threads} threads"


def test_float32_has_the_same_bits_on_all_and_bfloat16_has_not() -> None:
    """So that nothing was compared with itself: sums are taken in other orders."""
    rows, found = torch.arange(690, 720), []
    plain = run(rows, 1, torch.float32)
    for name in ("widened", *INSTRUCTIONS):
        other = run(rows, 1, torch.float32, kernels=kernels_of(name))
        assert all(torch.equal(plain[key], other[key]) for key in plain)
        found.append(run(rows, 1, torch.bfloat16, kernels=kernels_of(name))["dw"])
    assert not any(torch.equal(a, b) for a, b in ((found[0], found[1]), (found[1], found[2]), (found[0], found[2])))
