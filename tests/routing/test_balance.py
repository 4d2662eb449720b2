"""The expert bias evens out a badly skewed model within 200 steps while it learns: benchmarks/balance.py."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path

from helpers.threads import torch_threads


def test_the_bias_balances_while_the_loss_falls() -> None:
    spec = importlib.util.spec_from_file_location("balance", Path(__file__).parents[2] / "benchmarks" / "balance.py")
    assert spec is not None
    assert spec.loader is not None
    balance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(balance)
    with torch_threads(1):
        losses, unevenness = balance.train("sign")
    assert statistics.mean(unevenness[:5]) > 1.5  # of 3.0 at most
    assert statistics.mean(unevenness[-20:]) < 0.5
    means = [statistics.mean(losses[i : i + 50]) for i in range(0, 200, 50)]
    assert means == sorted(means, reverse=True)
    assert means[-1] < losses[0] / 2
