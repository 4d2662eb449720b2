"""The folder of a run of `trimtab train`: its metrics, and what its ranks said under `run_forked`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint import read_tensors


def metrics(out: Path) -> list[dict[str, Any]]:
    """The records of the steps."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers(out: Path) -> list[dict[str, Any]]:
    """The same without the times."""
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in metrics(out)]


def log(out: Path) -> str:
    """The words of the run's ranks."""
    return out.with_name(f"{out.name}-log").read_text()


def assert_same_bits(one: Path, other: Path, step: int, weights: str = "model.safetensors") -> None:
    """Every number of the metrics, every tensor of the checkpoint of a step and the model are the same."""
    assert numbers(one) == numbers(other)
    ours, theirs = (read_tensors(out / "checkpoints" / f"step-{step:08d}") for out in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (one / "final" / weights).read_bytes() == (other / "final" / weights).read_bytes()


def assert_same_run(ours: Path, theirs: Path, norm: float = 1e-5) -> None:
    """Loss, norm and loads of every step are the same but for rounding."""
    for one, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert_close(one, other, norm)
        assert one["layers"] == other["layers"]


def assert_close(one: dict[str, Any], other: dict[str, Any], norm: float = 1e-5) -> None:
    """The numbers of one step that `other` has, but for rounding; of the gradient's norm by `norm`."""
    bounds = {"loss": 1e-5, "grad_norm": norm, "lr": 0.0, "eval_loss": 1e-5, "eval_max_vio": 0.0}
    for key in bounds.keys() & other.keys():
        assert abs(one[key] - other[key]) <= bounds[key] * abs(other[key]), (key, one[key], other[key])
