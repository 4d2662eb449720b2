"""Balance over expert-parallel and FSDP2 ranks: decisions, counts and gradients of one process, counted once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.balance_ranks import alone, run_sharded
from helpers.ep_case import Case, Mesh
from helpers.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"bias": "sign", "rate": 0.05, "add_bias": True, "aux_loss": 0.5, "z_loss": 0.05},
    "deepseek_v3": {"bias": "sign", "rate": 0.05, "aux_loss": 0.5},
    "gpt_oss": {"bias": "quantile", "add_bias": True},
}
"""A bias of one's own and of the checkpoint, both rules, both losses."""

MESHES = (Mesh(ep=1, fsdp=2), Mesh(ep=2, fsdp=2), Mesh(ep=2, fsdp=4))


@pytest.mark.xdist_group("ranks4")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_balance_like_one(mesh: Mesh, tmp_path: Path) -> None:
    ways = ("", "reentrant", "non-reentrant")
    plain = [Case(family=name, mesh=mesh, dtype=torch.float64, steps=2) for name in OPTIONS]
    cases = [replace(case, recompute=way) for case in plain for way in (ways if case is plain[0] else ways[1:2])]
    answers = run_ranks(run_sharded, mesh.ranks, cases, OPTIONS, str(tmp_path), deadline=180.0)
    for i, case in enumerate(cases):
        wanted = alone(case, OPTIONS)
        slots = 2 * 24 * case.steps * mesh.data_ranks
        assert all(int(load.sum()) == slots for loads in wanted["loads"] for load in loads.values()), "once"
        assert all(bias.any() for bias in wanted["biases"][0].values())
        for step in range(2):
            summed = sum(rank[i]["counted"][step] for rank in answers)
            assert torch.equal(summed, wanted["counted"][step]), f"{case}: what LoadCallback counts"
        for rank in answers:
            found = rank[i]
            for step in range(2):
                assert found["loads"][step].keys() == wanted["loads"][step].keys()
                assert all(map(torch.equal, found["loads"][step].values(), wanted["loads"][step].values())), str(case)
                assert all(map(torch.equal, found["biases"][step].values(), wanted["biases"][step].values())), str(case)
                assert found["losses"][step] == pytest.approx(wanted["losses"][step], rel=1e-6), str(case)
            assert wanted["grads"].keys() <= found["grads"].keys()
            for name, grad in wanted["grads"].items():
                scale = max(float(grad.abs().max()), 1e-6)
                off = float((found["grads"][name] - grad).abs().max())
                bound = 2e-6 if grad.dtype == torch.float32 or "deepseek" in case.family else 1e-9
                assert off <= bound * scale, f"{case}: {name} is off by {off:.1e} of {scale:.1e}"
