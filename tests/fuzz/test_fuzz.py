"""The fuzz draws what it says, agrees with a loop over tokens, and finds and shrinks faults that are planted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fuzz.cases import BLOCK, Case, Shape, case_of, draw_shape, worlds_of
from fuzz.check import check
from fuzz.run import FuzzResult, parse_case, run_case, run_fuzz
from fuzz.truth import truth_of
from fuzz.world import OutOfStep, Turns
from trimtab.dispatch import dispatcher, route, sequence_shard
from trimtab.dispatch.plan import RankSort
from trimtab.errors import InputError
from trimtab.experts import plan
from trimtab.experts.plan import ExpertPlan
from trimtab.kernels.rows import Csr


def test_what_ships_has_no_failure_and_every_case_is_run() -> None:
    seen: list[tuple[int, int]] = []
    result = run_fuzz(5 * BLOCK + 5, seed=3, workers=0, report=lambda done, failures: seen.append((done, failures)))
    assert result == FuzzResult(cases=5 * BLOCK + 5, worlds=12, failures=[])
    assert seen[-1] == (5 * BLOCK + 5, 0)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_case_is_drawn_from_its_seed_and_number_alone() -> None:
    drawn = [case for world in worlds_of(7, 2) for case in world]
    assert len(drawn) == BLOCK
    assert [case_of(7, 2 * BLOCK + i) for i in (0, 5, BLOCK - 1)] == [drawn[i] for i in (0, 5, BLOCK - 1)]
    assert case_of(8, 2 * BLOCK) != drawn[0]
    assert eval(drawn[5].describe(), {"Case": Case, "Shape": Shape}) == drawn[5]


def test_the_draws_cover_what_the_fuzz_promises() -> None:
    shapes = [draw_shape(0, block)[0] for block in range(300)]
    cases = [case_of(0, block * BLOCK + 1) for block in range(300)]
    assert {shape.ranks for shape in shapes} == set(range(1, 9))
    assert {shape.top_k for shape in shapes} >= {1, 8}
    assert {shape.transport for shape in shapes} == {"direct", "gathered", "none"}
    assert {shape.plan for shape in shapes} == {"exact", "counted", "static", "static_counted"}
    assert {shape.alignment for shape in shapes} == {1, 8, 16, 32, 128}
    assert any(shape.lengths and 0 in shape.lengths and max(shape.lengths) > 1 for shape in shapes)
    per_rank = [[case.holder.count(rank) for rank in range(case.shape.ranks)] for case in cases]
    assert any(0 in sizes and max(sizes) > 1 for sizes in per_rank)
    assert any(sum(sizes) == 0 for sizes in per_rank)
    assert any(len(set(row)) < len(row) and -1 not in row for case in cases for row in case.ids)
    assert any(-1 in row and max(row) >= 0 for case in cases for row in case.ids)
    assert any(True in case.real and False in case.real for case in cases)
    owners = [{i // c.shape.experts for row in c.ids for i in row if i >= 0} for c in cases if c.shape.ranks > 2]
    assert any(len(found) == 1 for found in owners)


def test_the_truth_is_the_sum_over_tokens_and_slots() -> None:
    """By a loop in plain Python: y and, by moving one weight or one value at a time, both gradients."""
    for block in range(12):
        truth = truth_of(worlds_of(1, block)[1][:5])
        shape, C, e = truth.shape, truth.cases, truth.shape.experts
        scale, shift = (t.flatten(0, 2).double() for t in (truth.scale_PCe, truth.shift_PCeD))
        assert len(scale) == shape.ranks * C * e
        for t in range(len(truth.case_T)):
            y, dx = torch.zeros(shape.width).double(), torch.zeros(shape.width).double()
            dy, x = truth.dy_TD[t].double(), truth.x_TD[t].double()
            for k in range(shape.top_k):
                expert = int(truth.ids_TK[t, k])
                if expert < 0 or not truth.real_T[t]:
                    assert truth.dw_TK[t, k] == 0
                    continue
                assert expert // e % C == truth.case_T[t]
                out = scale[expert] * x + shift[expert]
                y += truth.w_TK[t, k] * out
                dx += truth.w_TK[t, k] * scale[expert] * dy
                assert truth.dw_TK[t, k] == out @ dy
            assert torch.equal(y, truth.y_TD[t])
            assert torch.equal(dx, truth.dx_TD[t])


def wrong_row_order() -> AbstractContextManager[object]:
    original = route.combine_rows

    def bad(rows: Tensor, csr: Csr, weights: Tensor | None = None) -> Tensor:
        return original(rows.flip(0), csr, weights)

    return patch.object(route, "combine_rows", bad)


def lost_duplicates() -> AbstractContextManager[object]:
    original = dispatcher.sort_by_rank

    def bad(ids: Tensor, experts: int, ranks: int) -> RankSort:
        again = ids[:, 1:] == ids[:, :-1]
        return original(torch.cat((ids[:, :1], ids[:, 1:].masked_fill(again, -1)), 1), experts, ranks)

    return patch.object(dispatcher, "sort_by_rank", bad)


def misaligned_offset() -> AbstractContextManager[object]:
    original = plan.plan_experts

    def bad(ids: Tensor, experts: int, *, alignment: int = 1, **options: object) -> ExpertPlan:
        made = original(ids, experts, alignment=alignment, **options)
        late = made.offsets_e.clone()
        late[1:-1] += (alignment > 1) * (made.counts_e[1:] > 0)
        return made._replace(offsets_e=late)

    return patch.object(plan, "plan_experts", bad)


def batch_one_offset() -> AbstractContextManager[object]:
    def bad(x: Tensor, cuts: Sequence[int], rank: int) -> Tensor:
        start, end = (cut * x.shape[0] for cut in cuts[rank : rank + 2])
        return x.flatten(0, 1)[start:end].reshape(x.shape[0], cuts[rank + 1] - cuts[rank], x.shape[2]).contiguous()

    return patch.object(sequence_shard, "take_shard", bad)


def padding_is_read() -> AbstractContextManager[object]:
    original = plan.csr_of

    def bad(rows: Tensor, keep: Tensor, bags: int, size: int | None = None, *, static: bool | None = None) -> Csr:
        good = original(rows, keep, bags, size, static=static)
        return Csr(indices=torch.where(good.indices == 9, 8, good.indices), indptr=good.indptr)

    return patch.object(plan, "csr_of", bad)


@pytest.mark.parametrize(
    ("fault", "tokens", "ranks"),
    [(wrong_row_order, 2, 1), (lost_duplicates, 1, 1), (misaligned_offset, 1, 1), (batch_one_offset, 4, 2)],
)
def test_a_planted_fault_is_found_and_made_small(
    fault: Callable[[], AbstractContextManager[object]], tokens: int, ranks: int
) -> None:
    result = run_fuzz(500, seed=5, workers=0, within=fault)
    (failure,) = result.failures
    assert result.cases <= 500
    (small,) = failure.small
    assert small.shape.ranks == ranks
    assert len(small.holder) == tokens
    assert small.shape.top_k <= 2
    assert small.shape.dtype == "float64"
    assert failure.command == f"python -m fuzz --case=5:{failure.index}"
    with fault():
        again = run_case(5, failure.index)
        assert again is not None
        assert again.wrong == failure.wrong
        assert check(failure.small) == failure.small_wrong
    assert run_case(5, failure.index) is None
    assert check(failure.small) is None


def test_a_failure_prints_a_program_that_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    (failure,) = run_fuzz(500, seed=5, workers=0, within=lost_duplicates).failures
    program = str(failure).partition("\n\nfrom ")[2]
    with lost_duplicates():
        exec("from " + program, {})
    assert capsys.readouterr().out == f"{failure.small_wrong}\n"
    assert "ids=((0, 0),)" in program


def test_a_fault_that_needs_many_rows_is_found_among_cases_side_by_side() -> None:
    (failure,) = run_fuzz(500, seed=5, workers=0, within=padding_is_read).failures
    assert "got" in failure.wrong or "Error" in failure.wrong
    with padding_is_read():
        assert check(failure.small) is not None


def test_workers_find_the_same_failure() -> None:
    here = run_fuzz(8 * BLOCK, seed=5, workers=0, within=lost_duplicates)
    there = run_fuzz(8 * BLOCK, seed=5, workers=2, within=lost_duplicates)
    assert len(here.failures) == 1
    assert there.failures == here.failures


def test_ranks_out_of_step_and_ranks_that_fail_end_the_world() -> None:
    before = set(threading.enumerate())

    def skips(turns: Turns, rank: int) -> list[int]:
        first = turns.swap(rank, "rows", rank)
        return first if rank == 1 else turns.swap(rank, "rows", -rank)

    for ranks in (2, 3, 5):
        turns = Turns(ranks)
        with pytest.raises(OutOfStep, match="rank 0 exchanges rows"):
            turns.run(lambda rank, turns=turns: skips(turns, rank))
    turns = Turns(2)
    with pytest.raises(OutOfStep, match="headers"):
        turns.run(lambda rank: turns.swap(rank, "headers" if rank else "rows", rank))

    def fails(rank: int) -> list[int]:
        if rank == 1:
            raise ValueError("rank 1 broke")
        return failing.swap(rank, "rows", rank)

    failing = Turns(3)
    with pytest.raises(ValueError, match="rank 1 broke"):
        failing.run(fails)
    fine = Turns(3)
    assert fine.run(lambda rank: fine.swap(rank, "rows", rank * rank)) == [[0, 1, 4]] * 3
    assert set(threading.enumerate()) <= before


def test_a_case_is_named_by_two_numbers() -> None:
    assert parse_case("7:123") == (7, 123)
    for text in ("7", "7:", "a:1", "7:-1", "7:1:2"):
        with pytest.raises(InputError, match="SEED:INDEX"):
            parse_case(text)
