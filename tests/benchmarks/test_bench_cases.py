"""Bytes against hand counts, workloads against their descriptions, the judge's truth against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.layer import fewest_bytes
from benchmarks.layer_builds import alone, build
from benchmarks.layer_case import AUTOCAST, LayerCase, LayerData, expert_weights, parse_shape
from benchmarks.layer_step import layer_subject
from benchmarks.layer_truth import BOUNDS, NAMES, compare, probe, truth
from benchmarks.step import first_is_right, step_task
from benchmarks.subject import Where
from benchmarks.workloads import WORKLOADS, draw, lane_rows, token_counts
from helpers.comparing import assert_close
from trimtab import oracle
from trimtab.errors import ConfigError

CASE = LayerCase(dim=6, hidden=5, num_experts=4, top_k=2, tokens=7, dtype="fp32", workload="zipf", ranks=2)
ALONE = replace(CASE, dim=8, hidden=16, ranks=1, workload="balanced")


def test_bytes_of_hand_counted_tensors() -> None:
    # D 4, F 5: an expert has 10 x 4 + 4 x 5 = 60 values; 3 tokens are 12; 3 of the 4 experts have rows.
    case = LayerCase(dim=4, hidden=5, num_experts=4, top_k=2, tokens=3, dtype="bf16", workload="zero_expert_rank")
    assert {int(i) for i in case.ids(0).flatten()} == {0, 1, 2}
    forward = 3 * 60 + 12 + 12
    assert fewest_bytes(case, "forward") == 2 * forward
    backward = 3 * 60 + 12 + 12 + 12 + 4 * 60  # weights, x, dy in; dx, all gradients out
    assert fewest_bytes(case, "forward+backward") == 2 * (forward + backward)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 2, 1), (8, 3, 2), (64, 8, 2)])
def test_workloads_are_what_they_are_called(workload: str, experts: int, top_k: int, ranks: int) -> None:
    tokens = 240
    drawn = [draw(workload, tokens, top_k, experts, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [ids.shape for ids in drawn] == [(n, top_k) for n in token_counts(workload, tokens, ranks)]
    assert sum(len(ids) for ids in drawn) == tokens * ranks
    for ids in drawn:
        assert all(len(set(row)) == top_k for row in ids.tolist()), "different experts for a token"
    loads = torch.bincount(torch.cat(drawn).flatten(), minlength=experts)
    mean = tokens * ranks * top_k / experts
    if workload in ("balanced", "source_ragged"):
        assert loads.max() - mean < 0.2 * mean
    if workload == "random":  # a multinomial's spread, neither none nor that of a preference
        spread = float((loads - mean).square().mean() / mean)
        assert 0.3 < spread < 2.0
    if workload == "zipf":
        assert loads.max() > 1.3 * mean
    if workload == "hot":
        assert loads[0] == tokens * ranks
    e = experts // ranks
    if workload == "hot_rank":
        assert loads[:e].sum() == tokens * ranks * min(top_k, e)
    if workload == "spread":
        assert loads[::e].sum() == tokens * ranks * min(top_k, ranks)
    if workload == "rotating":
        owners = [torch.bincount((ids // e).flatten(), minlength=ranks).argmax() for ids in drawn]
        assert owners == [(rank + 1) % ranks for rank in range(ranks)]
    if workload == "burst" and ranks > 1:
        assert loads[:e].sum() > 1.2 * tokens * top_k
        assert loads[e:].sum() > 0.4 * tokens * top_k
    if workload == "zero_expert_rank":
        idle = experts // ranks if ranks > 1 else experts // 4
        assert loads[experts - idle :].sum() == 0
    if workload == "source_ragged" and ranks > 1:
        assert len({len(ids) for ids in drawn}) == ranks
    assert torch.equal(drawn[0], draw(workload, tokens, top_k, experts, rank=0, ranks=ranks)), "the same each time"


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="'even' is not one of balanced"):
        draw("even", 4, 2, 8)
    with pytest.raises(ConfigError, match="fewer than 4 of 4"):
        draw("zero_expert_rank", 4, 4, 4)
    with pytest.raises(ConfigError, match="3 of 2 experts"):
        draw("balanced", 4, 3, 2)
    assert parse_shape("A") == (512, 256, 64, 8)
    assert parse_shape("4,3,2,1") == (4, 3, 2, 1)
    for text in ("4,3,2", "4,3,1,2", "0,3,2,1", "big"):
        with pytest.raises(ConfigError, match="--shape"):
            parse_shape(text)


def test_a_row_goes_once_to_a_rank() -> None:
    ids = torch.tensor([[0, 1], [0, 3], [2, 3], [1, 2]])
    assert lane_rows(ids, 4, 2) == [3, 3]  # tokens 0, 1, 3 have experts of rank 0; 1, 2, 3 of rank 1


def test_the_judges_truth_is_the_oracles() -> None:
    """Over both ranks' tokens, with autograd through the oracle in float64."""
    ranks = [LayerData.of(CASE, rank) for rank in range(2)]
    x, w = (torch.cat(t).detach().double().requires_grad_() for t in ([d.x_TD for d in ranks], [d.w_TK for d in ranks]))
    gate_up, down = (t.double().requires_grad_() for t in expert_weights(CASE))
    y = oracle.moe(x, torch.cat([d.ids_TK for d in ranks]), w, gate_up, down)
    y.backward(torch.cat([d.dy_TD for d in ranks]).double())
    found = truth(CASE, torch.float64)
    for name, value in zip(NAMES, (y.detach(), x.grad, w.grad, gate_up.grad, down.grad), strict=True):
        assert value is not None
        got = torch.cat([rank[name] for rank in found])
        assert_close(got, value if value is w.grad else value @ probe(value).double(), 1e-12, name)


@pytest.mark.parametrize("who", ["eager", "grouped_mm", "trimtab", "alone"])
def test_the_truth_is_what_contestants_compute(who: str) -> None:
    def outcome(case: LayerCase) -> list[dict[str, torch.Tensor]]:
        if who == "alone":
            layer, params = alone(case, "auto", expert_weights(case))
            found = layer_subject(layer, case, 0, params).outcome
        else:
            found = build(case.as_args(implementation=who), Where(rank=0, ranks=1)).outcome
        assert found is not None
        return [found()]

    assert compare(outcome(ALONE), truth(ALONE), 2e-6) is None
    if who in ("eager", "trimtab"):  # products in bfloat16 are far from those in float32
        case = replace(ALONE, dtype=AUTOCAST)
        assert compare(outcome(case), truth(case), BOUNDS[AUTOCAST]) is None
        assert compare(outcome(case), truth(case), BOUNDS["fp32"]) is not None


def test_wrong_numbers_are_found() -> None:
    true = truth(CASE)
    assert compare(true, true, BOUNDS["fp32"]) is None
    for name in true[1]:
        largest = max(rank[name].abs().max() for rank in true)
        off = [dict(rank) for rank in true]
        off[1][name] = off[1][name] + 3 * BOUNDS["fp32"] * largest
        assert f"{name} of rank 1 is off by" in (compare(off, true, BOUNDS["fp32"]) or "")
        off[1][name] = torch.full_like(off[1][name], float("nan"))
        assert f"{name} of rank 1 is off by nan" in (compare(off, true, BOUNDS["fp32"]) or "")
    short = [true[0], {**true[1], "y": true[1]["y"][1:]}]
    assert "y of rank 1 has the shape" in (compare(short, true, 1e-4) or "")


def test_training_steps_are_judged_by_the_stock_one() -> None:
    contestants = step_task(tiny=True).contestants
    assert [c.role for c in contestants] == ["peer", "ours"]
    judge = first_is_right(1e-3)
    right = {"first loss": torch.tensor([5.0]), "norm of the gradient of w": torch.tensor([2.0])}
    assert judge(contestants[0], [right]) is None
    assert judge(contestants[1], [right]) is None
    for name in right:
        wrong = judge(contestants[1], [right | {name: right[name] * 1.01}])
        assert f"{name} is off by" in (wrong or "")


def test_ranks_hold_the_weights_that_one_rank_holds() -> None:
    whole = expert_weights(CASE)
    parts = [expert_weights(CASE, rank) for rank in range(2)]
    for i in (0, 1):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])
