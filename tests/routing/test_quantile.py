"""Quantile balancing against quantiles of all scores, sorted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trimtab.routing.balance import max_vio
from trimtab.routing.quantile import BINS, add_required, quantile_bias

E, K = 8, 2


def scores(tokens: int, seed: int = 0) -> Tensor:
    """Two experts are liked by nearly everybody."""
    logits = torch.randn(tokens, E, generator=torch.Generator().manual_seed(seed))
    logits[:, :2] += 3
    return logits.sigmoid()


def counted(scores_TE: Tensor, bias_E: Tensor, real_T: Tensor | None = None) -> Tensor:
    histogram = torch.zeros(E, BINS, dtype=torch.int64)
    add_required(histogram, scores_TE, bias_E, K, real_T)
    return histogram


def exact(scores_TE: Tensor, bias_E: Tensor) -> Tensor:
    cutoff = (scores_TE + bias_E).sort(dim=1, descending=True).values[:, K]
    required = (cutoff[:, None] - scores_TE).sort(dim=0).values
    solved = required[round(len(scores_TE) * K / E) - 1]
    return solved - solved.mean()


@pytest.mark.parametrize("tokens", [4096, 64])
def test_it_is_the_quantile_of_what_tokens_require(tokens: int) -> None:
    taken = scores(tokens)
    bias = torch.linspace(-0.3, 0.4, E)
    width = (0.7 + 2) / BINS
    torch.testing.assert_close(quantile_bias(counted(taken, bias), bias, K), exact(taken, bias), rtol=0, atol=2 * width)


def test_a_few_steps_balance() -> None:
    """To the tokens that one bin more or less of bias decides, and the exact quantile to nearly none."""
    taken, bias, sharp = scores(4096), torch.zeros(E), torch.zeros(E)
    mean = 4096 * K / E

    def vio(bias_E: Tensor) -> float:
        return max_vio((taken + bias_E).topk(K, dim=1).indices.flatten().bincount(minlength=E))

    assert vio(bias) > 2
    for _ in range(12):
        bias = quantile_bias(counted(taken, bias), bias, K)
        sharp = exact(taken, sharp)
    biased = taken + bias
    away = (biased.topk(K + 1, dim=1).values[:, -1:] - biased).abs()
    width = float(bias.max() - bias.min() + 2) / BINS
    undecided = ((away > 0) & (away <= width)).sum(0).max()  # not those that set the cutoff
    assert vio(bias) <= float(undecided) / mean < 0.1
    assert vio(sharp) < 0.01
    assert abs(bias.mean()) < 1e-6


def test_parts_are_summed_exactly_and_masked_tokens_left_out() -> None:
    taken, bias = scores(100), torch.linspace(0, 1, E)
    real = torch.arange(100) % 3 > 0
    parts = [counted(taken[a:b], bias, real[a:b]) for a, b in ((0, 40), (40, 40), (40, 100))]
    whole = counted(taken[real], bias)
    assert torch.equal(sum(parts), whole)
    assert whole.sum() == int(real.sum()) * E
    assert torch.equal(quantile_bias(torch.zeros_like(whole), bias, K), bias), "no tokens, no change"
