"""Scores and weights against float64, their gradients too; in float32 whatever the tokens' dtype."""

from __future__ import annotations

import pytest
import torch

from helpers.comparing import assert_close
from helpers.router_truth import truth_scores, truth_weights
from trimtab.errors import ConfigError
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig
from trimtab.routing.scores import SCORES, Score, count_ids, pick_weights, router_logits

T, D, E, K = 13, 16, 6, 3
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}


def picked(logits: torch.Tensor, ids: torch.Tensor, c: RouterConfig) -> torch.Tensor:
    score = SCORES[c.score]
    return pick_weights(logits, score.of(logits), ids, score, normalize=c.normalize, scale=c.scale)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_weights_and_their_gradients(kind: str, normalize: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    config = RouterConfig(num_experts=E, top_k=K, score=kind, normalize=normalize, scale=2.5)
    logits = (3 * torch.randn(T, E, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    ids = torch.rand(T, E, generator=g).argsort(1)[:, :K]
    ids[1, 1], ids[2] = -1, -1
    dw = torch.randn(T, K, generator=g, dtype=torch.float64)
    weights = picked(logits, ids, config)
    (grad,) = torch.autograd.grad(weights, logits, dw.to(dtype))
    true_logits = logits.detach().double().requires_grad_()
    truth = truth_weights(true_logits, ids, config)
    (true_grad,) = torch.autograd.grad(truth, true_logits, dw)
    assert weights.dtype == grad.dtype == dtype
    assert (weights[2] == 0).all()
    assert_close(weights, truth, BOUNDS[dtype], "weights")
    assert_close(grad, true_grad, BOUNDS[dtype], "grad")


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("normalize", [False, True])
def test_extreme_logits_have_finite_weights_and_gradients(kind: str, normalize: bool) -> None:
    config = RouterConfig(num_experts=4, top_k=2, score=kind, normalize=normalize)
    logits = torch.tensor([[500.0, -500.0, 200.0, -200.0], [-500.0] * 4, [500.0] * 4], requires_grad=True)
    for ids in (torch.tensor([[1, 3]] * 3), torch.tensor([[0, 2]] * 3), torch.full((3, 2), -1)):
        weights = picked(logits, ids, config)
        (grad,) = torch.autograd.grad(weights.square().sum(), logits)
        assert weights.isfinite().all()
        assert grad.isfinite().all()


def test_a_normalised_softmax_does_not_underflow() -> None:
    """Replayed or biased picks may all have scores that float32 rounds to 0; their ratios are still known."""
    config = RouterConfig(num_experts=3, top_k=2, normalize=True)
    logits = torch.tensor([[300.0, 0.0, 1.0]])
    weights = picked(logits, torch.tensor([[1, 2]]), config)
    assert_close(weights, torch.tensor([[0.0, 1.0]]).double().softmax(-1), 2e-6, "weights")


@pytest.mark.parametrize("kind", SCORES)
def test_far_logits_score_as_in_float64(kind: str) -> None:
    logits = torch.tensor([[-40.0, -30.0, -1.0, 0.0, 1.0, 25.0, 45.0]])
    ours, truth = SCORES[kind].of(logits), truth_scores(logits.double(), kind)
    assert ((ours.double() - truth) / truth).abs().max() < 1e-5


def test_bfloat16_tokens_give_float32_logits_and_gradients_of_their_dtype() -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(T, D, generator=g).bfloat16().requires_grad_()
    weight = torch.randn(E, D, generator=g).requires_grad_()
    d = torch.randn(T, E, generator=g)
    logits = router_logits(x, weight)
    dx, dw = torch.autograd.grad(logits, (x, weight), d)
    assert (logits.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert_close(logits, x.double() @ weight.double().T, 2e-6, "logits")
    assert_close(dw, d.double().T @ x.double(), 2e-6, "dw")
    assert_close(dx, d.double() @ weight.double(), 8e-3, "dx")


def test_autocast_does_not_round_logits() -> None:
    g = torch.Generator().manual_seed(2)
    x, weight = torch.randn(T, D, generator=g), torch.randn(E, D, generator=g)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router_logits(x, weight)
    assert_close(logits, x.double() @ weight.double().T, 2e-6, "logits")


def test_what_is_saved_is_the_tokens_as_they_came() -> None:
    x = torch.zeros(T, D, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        router_logits(x, torch.zeros(E, D, requires_grad=True))
    assert [t.dtype for t in saved if t.shape == (T, D)] == [torch.bfloat16]


def test_counts_leave_out_what_names_no_expert() -> None:
    ids = torch.tensor([[0, -1], [2, 2], [7, -5], [3, 0]])
    assert count_ids(ids, 4).tolist() == [2, 0, 2, 1]
    assert count_ids(ids[:0], 4).tolist() == [0, 0, 0, 0]


def test_a_score_from_outside_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer trains with it, and what does not know it is told which there are."""
    cold = Score(of=lambda logits: (logits / 2).softmax(-1), says="a softmax at temperature 2", distribution=True)
    monkeypatch.setitem(SCORES, "cold", cold)
    router = RouterConfig(num_experts=E, top_k=K, score="cold", normalize=True, aux_loss=0.1)
    moe = MoEConfig(dim=D, hidden=4, router=router).build()
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(3))
    out = moe(x)
    (out.y.square().sum() + out.losses["aux"]).backward()
    picked = (moe.router(x).logits_TE / 2).softmax(-1).gather(1, out.ids_TK)
    assert_close(moe.router(x).weights_TK, (picked / picked.sum(-1, keepdim=True)).double(), 2e-6, "weights")
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.any()
    monkeypatch.delitem(SCORES, "cold")
    with pytest.raises(ConfigError, match=r"score='cold' is not one of \('softmax', 'sigmoid', 'sqrtsoftplus'\)"):
        RouterConfig(num_experts=E, top_k=K, score="cold")
