"""Grouped products of bfloat16 in whichever form they are computed, against float64, and segments that are filled up.

Every CPU multiplies bfloat16, if slowly, so all of this runs on any: `native` says no more than what pays.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.comparing import assert_close
from helpers.threads import torch_threads
from trimtab import oracle
from trimtab.dispatch.plan import plan_experts
from trimtab.experts.module import ExpertMLP
from trimtab.kernels import onednn
from trimtab.kernels.loop import LoopKernels
from trimtab.kernels.pages import Pages
from trimtab.kernels.rows import combine_rows

SIZES = [(0,), (1,), (0, 0), (32, 32), (3, 0, 0, 5), (1, 1, 1), (128, 128, 129), (200, 200, 64, 64)]
BFLOAT16 = torch.bfloat16
FORMS, NAMES = [onednn.TILES, onednn.VECTORS], ["tiles", "vectors"]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "native", lambda: True)


@pytest.fixture(params=FORMS, ids=NAMES)
def pays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> onednn.Pays:
    """As on a CPU with either kind of instructions."""
    monkeypatch.setattr(onednn, "pays", lambda: request.param)
    found: onednn.Pays = request.param
    return found


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with torch_threads(request.param):
        yield request.param


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(BFLOAT16)


def poison(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.usefixtures("pays", "threads", "poisoned")
@pytest.mark.parametrize("columns_as_rows", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("a", "b"), [(700, 40), (1024, 512), (24, 600), (1, 1)])
def test_rows_times_weights(a: int, b: int, sizes: tuple[int, ...], columns_as_rows: bool) -> None:
    e, rows = len(sizes), sum(sizes)
    x, w = random(rows, a), random(e, b, a).mT if columns_as_rows else random(e, a, b)
    truth = [part.double() @ w[i].double() for i, part in enumerate(torch.split(x, list(sizes)))]
    wide = poison(rows, b + 3)
    for out in (poison(rows, b), wide[:, :b]):
        assert onednn.rows_times(x, w, sizes, out, Pages()) is out
        assert_close(out, torch.cat(truth), 1e-2, "product")
    assert torch.isnan(wide[:, b:]).all()


@pytest.mark.usefixtures("pays", "threads", "poisoned")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("a", "b"), [(40, 512), (700, 511), (1, 1)])
def test_weight_gradients(a: int, b: int, sizes: tuple[int, ...], add: bool) -> None:
    e, rows = len(sizes), sum(sizes)
    left, right = random(rows, a), random(rows, b)
    before = random(e, a, b) if add else poison(e, a, b)
    truth = torch.stack([
        (before[i].double() if add else 0) + x.double().t() @ y.double()
        for i, (x, y) in enumerate(zip(torch.split(left, list(sizes)), torch.split(right, list(sizes)), strict=True))
    ])  # fmt: skip
    onednn.weight_gradients(left, right, sizes, before, Pages(), add=add)
    assert_close(before, truth, 1e-2, "gradient")


@pytest.mark.usefixtures("threads", "poisoned")
@pytest.mark.parametrize("shape", [(150, 500), (150, 1030), (333, 4100), (2, 200, 1030), (3, 0, 5), (5, 7)], ids=str)
def test_matrices_are_turned_exactly(shape: tuple[int, ...]) -> None:
    matrices = random(*shape)
    out = torch.empty(matrices.mT.shape, dtype=BFLOAT16).fill_(float("nan"))
    onednn._turn_each(matrices, out)
    assert torch.equal(out, matrices.mT)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@given(st.lists(st.one_of(st.integers(0, 80), st.integers(0, 3000)), max_size=40))
def test_segments_hold_their_rows_and_little_else(form: onednn.Pays, counts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "pays", lambda: form)
        lengths = onednn.level(counts)
    assert len(lengths) == len(counts)
    if sum(counts) < onednn.SCARCE * sum(count > 0 for count in counts):
        assert lengths == counts
        return
    for count, length in zip(counts, lengths, strict=True):
        assert length >= count
        assert length % form.step == 0
        assert (length == 0) == (count == 0)
        assert length < count + max(form.step, count / 32) or length <= onednn.EACH
    assert sum(lengths) <= 1.25 * sum(counts) + form.step * sum(count > 0 for count in counts)


def test_neighbours_with_about_as_many_rows_get_as_many(pays: onednn.Pays) -> None:
    few, some = [30, 20, 32, 0, 60, 70, 400, 390], [250, 256, 260, 270, 255]
    if pays is onednn.TILES:
        assert onednn.level(few) == [32, 32, 32, 0, 96, 96, 416, 416]
        assert onednn.level(some) == [288, 288, 288, 288, 256]
    else:
        assert onednn.level(few) == [32, 32, 32, 0, 72, 72, 400, 392]
        assert onednn.level(some) == [272, 272, 272, 272, 256]


def test_many_rows_are_filled_up_to_few_different_numbers(pays: onednn.Pays) -> None:
    numbers = {n for count in range(onednn.SCARCE, 1 << 15) for n in onednn.level([count])}
    assert len(numbers) == 64 + 32 * (6 if pays is onednn.VECTORS else 4)


def test_as_many_rows_share_a_larger_block() -> None:
    offsets = torch.tensor([0, 300, 600, 900, 1200, 1210, 1300])
    blocks = [b.experts for b in LoopKernels().blocks(offsets, 1300, 256, torch.float32)]
    assert blocks == [slice(i, i + 1) for i in range(4)] + [slice(4, 6)]


@pytest.mark.usefixtures("native")
def test_as_many_rows_share_a_larger_block_in_bfloat16(pays: onednn.Pays) -> None:
    offsets = torch.tensor([0, 300, 600, 900, 1200, 1210, 1300])
    blocks = [b.experts for b in LoopKernels().blocks(offsets, 1300, 256, BFLOAT16)]
    shared = [slice(0, 3), slice(3, 4)] if pays is onednn.TILES else [slice(0, 4)]
    assert blocks == [*shared, slice(4, 6)]
    each = [b.experts for b in LoopKernels().blocks(torch.arange(4) * (onednn.EACH + 1), 1155, 256, BFLOAT16)]
    assert each == [slice(0, 1), slice(1, 2), slice(2, 3)]


@pytest.mark.usefixtures("poisoned")
def test_the_result_is_turned_where_that_pays(pays: onednn.Pays, monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[tuple[int, ...]] = []
    right = onednn._turn_each
    monkeypatch.setattr(onednn, "_turn_each", lambda m, out: (turned.append(tuple(m.shape)), right(m, out)))
    for rows, a, b in ((32, 512, 512), (64, 512, 512), (24, 1024, 1024), (64, 1024, 512)):
        w = random(1, b, a).mT
        onednn.rows_times(random(rows, a), w, [rows], torch.empty(rows, b, dtype=BFLOAT16), Pages())
    assert turned == ([(512, 32), (512, 64), (1024, 24), (512, 64)] if pays is onednn.TILES else [(512, 32), (512, 64)])
    turned.clear()
    left, right_rows = random(64, 40), random(64, 512)
    onednn.weight_gradients(left, right_rows, [64], torch.empty(1, 40, 512, dtype=BFLOAT16), Pages())
    assert turned == ([(64, 40)] if pays is onednn.TILES else [])


def test_products_of_tiles_have_their_own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles, expected in ((True, onednn.TILES), (False, onednn.VECTORS)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        assert onednn.pays() is expected


@pytest.mark.usefixtures("native", "poisoned")
def test_a_plan_of_filled_segments_has_every_slot_once() -> None:
    ids = torch.randint(-1, 6, (50, 3), generator=torch.Generator().manual_seed(1))
    ids[ids == 2] = 4
    plan, plain = plan_experts(ids, 5, kernels=LoopKernels(), level=BFLOAT16), plan_experts(ids, 5)
    assert plan.offsets_e.diff().tolist() == onednn.level(plain.counts_e.tolist())
    assert torch.equal(plan.slot_R[plan.slot_R >= 0], plain.slot_R)
    x = random(50, 8)
    rows = LoopKernels().gather(x, plan.row_R)
    assert torch.equal(rows[plan.row_R >= 0], x[plain.row_R])
    assert not rows[plan.row_R < 0].any()
    rows[plan.row_R < 0] = float("nan")
    assert torch.equal(combine_rows(rows, plan.row_csr), combine_rows(x[plain.row_R], plain.row_csr))


@pytest.mark.usefixtures("native", "poisoned")
def test_filled_segments_keep_a_row_of_nan_to_its_own_experts() -> None:
    """Row 0 is what an index of padding would read first."""
    E, D, F = 4, 16, 24
    mlp = ExpertMLP(E, D, F, kernels="loop", dtype=BFLOAT16)
    ids = torch.tensor([[0], *([[1 + i % 3] for i in range(40)])])
    x = random(41, D).index_fill_(0, torch.tensor([0]), float("nan")).requires_grad_()
    w = torch.rand(41, 1, requires_grad=True)
    y = mlp(x, ids, w)
    y.backward(random(41, D).index_fill_(0, torch.tensor([0]), float("nan")))
    truth = oracle.moe(x[1:], ids[1:], w[1:], mlp.up, mlp.down)
    assert_close(y[1:], truth, 3e-2, "output")
    assert torch.isnan(y[0]).all()
    for name, grad in (("up", mlp.up.grad), ("down", mlp.down.grad), ("x", x.grad), ("w", w.grad)):
        assert grad is not None
        assert torch.isfinite(grad[1:]).all(), name


@pytest.mark.usefixtures("native")
def test_no_row_is_filled_up_with_what_a_bias_may_make_of_it() -> None:
    """Here the rows of tokens cancel a bias that would be infinite in a row of zeros, times its weight of 0."""
    mlp = ExpertMLP(2, 16, 24, activation="relu_squared", bias=True, kernels="loop", dtype=BFLOAT16)
    assert mlp.up_bias is not None
    with torch.no_grad():
        mlp.up_bias[0, 0], mlp.up[0, 0], mlp.up[0, 0, 0] = 3e30, 0.0, -3e30
    x = random(20, 16)
    x[:, 0] = 1.0
    y = mlp(x, torch.arange(20)[:, None] % 2, torch.rand(20, 1))
    y.sum().backward()
    for param in mlp.parameters():
        assert param.grad is not None
        assert torch.isfinite(param.grad).all()
