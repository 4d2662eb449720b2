"""Costs against hand counts, workloads against their descriptions, the judge's truth against the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import layer_ours
from benchmarks.cost import combine_bytes, gather_bytes, layer_bytes
from benchmarks.layer_case import FAMILIES, LayerCase, LayerData, expert_weights, parse_shape
from benchmarks.layer_peers import build_transformers
from benchmarks.layer_truth import BOUNDS, compare, probe, truth
from benchmarks.names import AUTOCAST, WORKLOADS
from benchmarks.subject import Where
from benchmarks.train import _make_judge, train_task
from benchmarks.workloads import draw, lane_rows, token_counts
from helpers.comparing import assert_close
from trimtab import oracle
from trimtab.errors import ConfigError

CASE = LayerCase(dim=6, hidden=5, num_experts=4, top_k=2, tokens=7, dtype="fp32", workload="zipf", ranks=2)


def test_bytes_of_hand_counted_tensors() -> None:
    # D 4, F 5: an expert has 10 x 4 + 4 x 5 = 60 values; 3 tokens are 12.
    sizes = {"experts": 6, "active": 2, "size": 2}
    assert layer_bytes(3, 4, 5, **sizes, backward=False) == 2 * (2 * 60 + 12 + 12)
    backward = 2 * 60 + 12 + 12 + 12 + 6 * 60  # weights, x, dy in; dx, all gradients out
    assert layer_bytes(3, 4, 5, **sizes, backward=True) == 2 * (2 * 60 + 12 + 12 + backward)
    added = layer_bytes(3, 4, 5, **sizes, backward=True, in_place=True)
    assert added == 2 * (2 * 60 + 12 + 12 + backward + 6 * 60), "gradients are read as well"
    assert gather_bytes(5, 4, 2) == 5 * 4 * 2 * 2
    assert combine_bytes(6, 3, 4, 2) == (6 + 3) * 4 * 2


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 2, 1), (8, 2, 4), (8, 3, 2), (64, 8, 2)])
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
    up, down = (t.double().requires_grad_() for t in expert_weights(CASE))
    y = oracle.moe(x, torch.cat([d.ids_TK for d in ranks]), w, up, down)
    y.backward(torch.cat([d.dy_TD for d in ranks]).double())
    whole = {"y": y.detach(), "input gradient": x.grad, "up gradient": up.grad, "down gradient": down.grad}
    found = truth(CASE, torch.float64)
    for name, value in whole.items():
        got = torch.cat([rank[name] for rank in found])
        assert_close(got, value @ probe(value.shape[-1]).double(), 1e-12, name)
    assert_close(torch.cat([rank["routing weight gradient"] for rank in found]), w.grad, 1e-12, "dw")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("peer", ["", "eager", "grouped_mm", "trimtab-hf"])
def test_the_truth_of_a_family_is_its_own_loops(family: str, peer: str) -> None:
    case = replace(CASE, dim=8, hidden=4, family=family, ranks=1, workload="balanced")
    build, more = (build_transformers, {"peer": peer}) if peer else (layer_ours.build, {"kernels": "auto"})
    outcome = build(case.as_args(**more), Where(rank=0, ranks=1)).outcome()
    assert outcome is not None
    assert compare([outcome], truth(case), 2e-6) is None
    other = truth(replace(case, family=next(name for name in FAMILIES if name != family)))
    assert compare([outcome], other, BOUNDS["fp32"]) is not None


@pytest.mark.parametrize("peer", ["", "eager", "trimtab-hf"])
def test_layers_under_autocast_multiply_in_bfloat16(peer: str) -> None:
    case = replace(CASE, dim=8, hidden=16, ranks=1, workload="balanced", dtype=AUTOCAST)
    build, more = (build_transformers, {"peer": peer}) if peer else (layer_ours.build, {"kernels": "auto"})
    outcome = build(case.as_args(**more), Where(rank=0, ranks=1)).outcome()
    assert outcome is not None
    assert compare([outcome], truth(case), BOUNDS[AUTOCAST]) is None
    assert compare([outcome], truth(case), BOUNDS["fp32"]) is not None


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
    contestants = train_task("qwen3_moe", ranks=1, folder=Path("/nowhere")).contestants
    assert [c.role for c in contestants] == ["peer", "ours"]
    judge = _make_judge()
    right = {"first loss": torch.tensor([5.0]), "norm of the first gradients here": torch.tensor([2.0])}
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
