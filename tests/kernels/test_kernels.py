"""Each kernel against a plain loop, on values: empty groups, poisoned tails, stride-0 gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close
from trimtab.experts.plan import plan_experts
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import get_backend
from trimtab.kernels.rows import REST, Csr, combine_rows, cut_rest, gather_rows

CPU = torch.device("cpu")
A, B, E = 16, 24, 5
COUNTS = ([3, 0, 4, 1, 0], [0, 0, 0, 0, 0], [0, 9, 0, 0, 0], [1, 1, 1, 1, 1])


def over_blocks(
    kernels: Backend, counts: list[int], dtype: torch.dtype, together: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every kernel's results put together from the blocks, and the float64 truth. The stock tail holds NaN."""
    ids = torch.arange(E).repeat_interleave(torch.tensor(counts))[:, None]
    static = kernels.name == "grouped_mm"
    tail = 3 if static else 0
    ids = torch.cat((ids, torch.full((tail, 1), -1)))
    plan = plan_experts(ids, E, static=static)
    rows, used = plan.row_R.shape[0], sum(counts)
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(rows, n, generator=g, dtype=torch.float64).to(dtype) for n in (A, B))
    w, bias = torch.randn(E, A, B, generator=g).to(dtype), torch.randn(E, B, generator=g).to(dtype)
    a[used:] = b[used:] = float("nan")
    names = {"mm": (rows, B), "out": (rows, B), "wgrad": (E, A, B), "sum": (E, B), "expand": (rows, B)}
    names |= {"added": (E, A, B), "added_wide": (E, A, B)}
    ours = {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in names.items()}
    ours["added_wide"] = ours["added_wide"].double()
    for block in kernels.blocks(plan.offsets_e, rows, together):
        e, r = block.experts, block.rows
        ours["mm"][r] = kernels.grouped_mm(a[r], w[e], block)
        kernels.grouped_mm(a[r], w[e], block, ours["out"][r])
        kernels.grouped_wgrad(a[r], b[r], block, ours["wgrad"][e])
        ours["added"][e] = 2.0
        kernels.grouped_wgrad(a[r], b[r], block, ours["added"][e], add=True)
        ours["added_wide"][e] = 2.0
        kernels.grouped_wgrad(a[r], b[r], block, ours["added_wide"][e], add=True)
        ours["sum"][e] = kernels.grouped_sum(b[r], block)
        ours["expand"][r] = kernels.expand(bias[e], block)
    truth = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in names.items()}
    truth["out"] = truth["mm"]
    start = 0
    for i, count in enumerate(counts):
        s = slice(start, start + count)
        truth["mm"][s] = a[s].double() @ w[i].double()
        truth["wgrad"][i] = a[s].double().t() @ b[s].double()
        truth["sum"][i] = b[s].double().sum(0)
        truth["expand"][s] = bias[i].double()
        start += count
    truth["added"] = truth["added_wide"] = truth["wgrad"] + 2
    return ours, truth


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("together", [0, 4, 100])
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [
        ("torch", torch.float64, 1e-13), ("torch", torch.float32, 2e-6), ("torch", torch.bfloat16, 2e-2),
        ("grouped_mm", torch.float32, 2e-6), ("grouped_mm", torch.bfloat16, 2e-2), ("grouped_mm", torch.float16, 2e-3),
    ],
)  # fmt: skip
def test_grouped_kernels(name: str, dtype: torch.dtype, bound: float, together: int, counts: list[int]) -> None:
    ours, truth = over_blocks(get_backend(name, CPU), counts, dtype, together)
    for kernel, value in ours.items():
        assert_close(value, truth[kernel], bound, kernel)


@pytest.mark.parametrize("name", ["torch", "grouped_mm"])
def test_gather_takes_a_stride_zero_gradient_and_gives_a_dense_one(name: str) -> None:
    kernels = get_backend(name, CPU)
    got = kernels.gather(torch.ones(1).expand(4, 3), torch.tensor([3, 0, 3]))
    assert got.is_contiguous()
    assert torch.equal(got, torch.ones(3, 3))


def test_experts_of_few_rows_share_a_block_as_long_as_they_fit() -> None:
    loop, offsets = get_backend("torch", CPU), torch.tensor([0, 0, 0, 3, 3, 9, 10, 13, 13])
    found = [(b.experts, b.rows, b.offsets_e.tolist()) for b in loop.blocks(offsets, 20, 4)]
    assert found == [
        (slice(0, 4), slice(0, 3), [0, 0, 0, 3, 3]), (slice(4, 5), slice(3, 9), [0, 6]),
        (slice(5, 8), slice(9, 13), [0, 1, 4, 4]),
    ]  # fmt: skip
    assert [b.experts for b in loop.blocks(offsets, 20)] == [slice(i, i + 1) for i in range(8)]


@pytest.mark.parametrize("name", ["torch", "grouped_mm"])
def test_a_weight_takes_the_dtype_of_the_rows(name: str) -> None:
    kernels, offsets = get_backend(name, CPU), torch.tensor([0, 2, 3])
    (x, w), (block,) = (torch.ones(3, 16), torch.ones(2, 16, 8).bfloat16()), kernels.blocks(offsets, 3, 3)
    assert torch.equal(kernels.grouped_mm(x, w, block), torch.full((3, 8), 16.0))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["torch", "grouped_mm"])
def test_rows_that_no_block_reaches_are_zero(name: str) -> None:
    kernels, offsets = get_backend(name, CPU), torch.tensor([0, 2, 2, 3])
    x = torch.full((5, 16), float("nan"))
    x[:3] = 1.0
    y = kernels.empty_rows(5, 8, torch.float32, offsets)
    for block in kernels.blocks(offsets, 5):
        kernels.grouped_mm(x[block.rows], torch.ones(3, 16, 8)[block.experts], block, y[block.rows])
    assert torch.equal(y, torch.tensor([16.0, 16.0, 16.0, 0.0, 0.0])[:, None].expand(5, 8))


def test_gather_of_padding_is_zero_even_from_no_rows() -> None:
    stock = get_backend("grouped_mm", CPU)
    assert torch.equal(stock.gather(torch.empty(0, 3), torch.tensor([-1, -1])), torch.zeros(2, 3))
    x, index = torch.randn(2, 3), torch.tensor([1, -1, 0])
    assert torch.equal(stock.gather(x, index), torch.where(index[:, None] < 0, 0, x[index]))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tail", [0, 3])
def test_bags_sum_in_float32_and_never_read_what_no_bag_names(dtype: torch.dtype, tail: int) -> None:
    rows = torch.randn(7, 40, dtype=torch.float64).to(dtype)
    rows[6] = float("nan")
    index = torch.tensor([0, 5, 2, 2, 1] + [6] * tail)
    got = combine_rows(rows, Csr(indices=index, indptr=torch.tensor([0, 0, 2, 2, 5])))
    each = rows.double()
    truth = torch.stack((0 * each[0], each[0] + each[5], 0 * each[0], 2 * each[2] + each[1]))
    assert got.dtype == dtype
    # One rounding of the exact sum, within one unit of the last place: not one per addition.
    assert_close(got, truth, 2 * torch.finfo(dtype).eps, "bags")


@pytest.mark.parametrize("tail", [0, 1, 255, 1000])
def test_what_no_bag_names_is_shared_among_many(tail: int) -> None:
    bags, rows = Csr(indices=torch.arange(5 + tail), indptr=torch.tensor([0, 0, 2, 2, 5])), torch.randn(5 + tail, 3)
    cuts = cut_rest(bags)
    sizes = torch.cat((cuts, torch.tensor([5 + tail]))).diff()
    assert torch.equal(cuts[:5], bags.indptr)
    assert sizes.min() >= 0
    assert sizes[4:].sum() == tail
    assert sizes[4:].max() <= -(-tail // REST)
    summed = torch.nn.functional.embedding_bag(bags.indices, rows, cuts, mode="sum")
    assert torch.equal(summed[:4], combine_rows(rows, bags))


def test_many_small_values_are_not_lost_in_a_narrow_sum() -> None:
    rows = torch.cat((torch.full((1, 4), 256.0), torch.full((64, 4), 0.5))).bfloat16()
    got = combine_rows(rows, Csr(indices=torch.arange(65), indptr=torch.tensor([0, 65])))
    assert torch.equal(got, torch.full((1, 4), 288.0).bfloat16())  # a bfloat16 sum would stay at 256


def test_bags_with_weights() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), 0.0]])
    got = combine_rows(
        rows, Csr(indices=torch.tensor([1, 0]), indptr=torch.tensor([0, 2, 2])), torch.tensor([2.0, 3.0, 5.0])
    )
    assert torch.equal(got, torch.tensor([[11.0, 16.0], [0.0, 0.0]]))


def test_gather_rows_into_a_buffer() -> None:
    x = torch.randn(4, 3)
    out = torch.full((2, 3), float("nan"))
    assert gather_rows(x, torch.tensor([2, 0]), out) is out
    assert torch.equal(out, x[[2, 0]])
