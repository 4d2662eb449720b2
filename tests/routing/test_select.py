"""Which experts are picked, against sorting in Python: ties, groups, bias, sinkhorn, expert choice, round robin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.comparing import assert_close
from helpers.router_truth import truth_group_top, truth_top
from trimtab.errors import ConfigError
from trimtab.routing.config import RouterConfig
from trimtab.routing.select import FEW, Choosing, select, sinkhorn, top

E = 12
NAN, INF = float("nan"), float("inf")


def pick(scores: torch.Tensor, config: RouterConfig, **kw: object) -> torch.Tensor:
    real = torch.ones(scores.shape[0], dtype=torch.bool)
    return select(Choosing(scores, scores, kw.get("bias"), kw.get("real", real), config, bool(kw.get("training"))))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=E, max_size=E), max_size=6), st.integers(1, E))
def test_ties_go_to_the_lowest_expert(rows: list[list[int]], k: int) -> None:
    scores = torch.tensor(rows, dtype=torch.float32).view(-1, E)
    ids = pick(scores, RouterConfig(num_experts=E, top_k=k))
    assert ids.dtype == torch.int64
    assert ids.tolist() == [truth_top(row, k) for row in rows]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=E, max_size=E), max_size=6),
    st.sampled_from([(2, 1), (3, 2), (6, 3), (4, 4)]),
    st.sampled_from(["top2", "max"]),
    st.integers(1, 4),
)
def test_groups_limit_the_choice(rows: list[list[int]], groups: tuple[int, int], group_score: str, k: int) -> None:
    config = RouterConfig(
        num_experts=E, top_k=k, groups=groups[0], top_groups=groups[1], group_score=group_score, score="sigmoid"
    )
    ids = pick(torch.tensor(rows, dtype=torch.float32).view(-1, E), config)
    assert ids.tolist() == [truth_group_top(row, config) for row in rows]


def test_bias_changes_the_choice_and_groups_see_it() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2]])
    config = RouterConfig(num_experts=4, top_k=2, bias=True, groups=2, top_groups=1)
    assert pick(scores, config, bias=torch.zeros(4)).tolist() == [[0, 1]]
    assert pick(scores, config, bias=torch.tensor([0.0, 0.0, 1.0, 2.0])).tolist() == [[3, 2]]


@pytest.mark.parametrize("few", [-1, FEW])
def test_nan_counts_as_the_largest(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.routing.select.FEW", few)
    assert top(torch.tensor([[1.0, float("nan"), 3.0]]), 2).tolist() == [[1, 2]]
    assert top(torch.tensor([[float("nan"), 2.0, -float("nan")]]), 3).tolist() == [[0, 2, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 8), (5, 5), (1, 1)])
def test_few_tokens_get_what_they_get_among_many(
    dtype: torch.dtype, experts: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    shut = torch.rand(9, experts, generator=g).masked_fill(torch.arange(experts) > 0, -torch.inf)
    for scores in (torch.rand(9, experts, generator=g), torch.randint(0, 3, (9, experts), generator=g), shut):
        few = top(scores.to(dtype), k)
        with monkeypatch.context() as patch:
            patch.setattr("trimtab.routing.select.FEW", -1)
            assert torch.equal(top(scores.to(dtype), k), few)
        assert all(len(set(row)) == k for row in few.tolist())


def test_sinkhorn_evens_out_columns_and_rows() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 8, generator=g, dtype=torch.float64) + torch.arange(8) * 0.3
    real = torch.rand(64, generator=g) < 0.7
    logits[~real] = 1e4
    done = sinkhorn(logits, real, 200)[real].exp()
    assert_close(done.sum(1), torch.ones(int(real.sum())), 1e-9, "rows")
    assert_close(done.sum(0), torch.full((8,), int(real.sum()) / 8), 1e-6, "columns")
    plain = torch.bincount(logits[real].argmax(1), minlength=8)
    config = RouterConfig(num_experts=8, top_k=1, select="sinkhorn")
    balanced = torch.bincount(pick(logits, config, real=real, training=True)[real].flatten(), minlength=8)
    assert balanced.max() < plain.max()
    assert pick(logits, config, real=real).flatten()[real].tolist() == logits[real].argmax(1).tolist()


@pytest.mark.parametrize("factor", [None, 0.5, 2.0, 100.0])
def test_experts_choose_their_best_tokens(factor: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    tokens, experts, k = 10, 5, 2
    scores = torch.randint(0, 6, (tokens, experts), generator=g).float()  # with ties: the first token
    real = torch.rand(tokens, generator=g) < 0.8
    config = RouterConfig(num_experts=experts, top_k=k, select="expert_choice", capacity_factor=factor)
    ids = pick(scores, config, real=real)
    room = -(-int((factor or 1.0) * k * tokens) // experts)
    for e in range(experts):
        order = sorted((t for t in range(tokens) if real[t]), key=lambda t: (-float(scores[t, e]), t))[:room]
        assert [t for t in range(tokens) if ids[t, e] == e] == sorted(order)
        assert set(ids[:, e].tolist()) <= {e, -1}


def test_round_robin_is_even_whatever_the_scores() -> None:
    config = RouterConfig(num_experts=E, top_k=5, select="balanced")
    ids = pick(torch.rand(24, E), config)
    assert torch.bincount(ids.flatten(), minlength=E).tolist() == [10] * E
    assert all(len(set(row)) == 5 for row in ids.tolist())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"top_k": 13}, "top_k=13"), ({"top_k": 0}, "top_k=0"), ({"score": "relu"}, "score='relu'"),
        ({"groups": 5}, "5 groups"), ({"groups": 4, "top_groups": 5}, "top_groups=5"),
        ({"groups": 4, "top_groups": 1, "top_k": 4}, "top_k=4"), ({"groups": 12, "top_groups": 6}, "at least 2"),
        ({"select": "balanced", "bias": True}, "select='topk'"), ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"jitter": 1.0}, "jitter"), ({"z_loss": -1.0}, "negative"),
        ({"select": "sinkhorn", "sinkhorn_iterations": 0}, "sinkhorn_iterations"),
        ({"top_k": 2.0}, r"top_k=2\.0"), ({"top_k": True}, "top_k=True"), ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts": 8.0}, r"num_experts=8\.0"), ({"groups": 0}, "groups=0"), ({"scale": NAN}, "scale=nan"),
        ({"capacity_factor": INF}, "capacity_factor=inf"), ({"capacity_factor": NAN}, "capacity_factor=nan"),
        ({"aux_loss": NAN}, "aux_loss=nan"), ({"z_loss": INF}, "z_loss=inf"), ({"bias_rate": NAN}, "bias_rate=nan"),
        ({"sequence_aux_loss": "1"}, "sequence_aux_loss='1'"), ({"jitter": NAN}, "jitter=nan"),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RouterConfig(**{"num_experts": E, "top_k": 2} | wrong)
