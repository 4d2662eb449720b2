"""Replay over expert-parallel and FSDP2 ranks: decisions of one process, counted once, and its gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.ep_case import Case, Mesh
from helpers.families import build_model
from helpers.ranks import run_ranks
from helpers.replay_ranks import alone, run_told

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")

MESHES = (Mesh(ep=1, fsdp=1), Mesh(ep=2, fsdp=2), Mesh(ep=2, fsdp=4))


@pytest.mark.xdist_group("ranks4")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_told_the_same_experts_ranks_train_like_one(mesh: Mesh, tmp_path: Path) -> None:
    families = FAMILIES if mesh.ranks == 2 else FAMILIES[:1]
    plain = [Case(family=name, mesh=mesh, dtype=torch.float64, steps=2) for name in families]
    ways = ("", "reentrant", "non-reentrant")
    cases = [replace(case, recompute=way) for case in plain for way in (ways if case is plain[0] else ways[::2])]
    answers = run_ranks(run_told, mesh.ranks, cases, str(tmp_path), deadline=180.0)
    for i, case in enumerate(cases):
        model = build_model(case.family, case.seed, torch.float64)
        model.set_experts_implementation("eager")
        wanted, recorded = alone(case, model)
        for rank, answer in enumerate(answers):
            found = answer[i]
            assert all(count == [1] for count in found["counts"].values()), str(case)
            for ours, true in zip(found["seen"], recorded[case.mesh.data_rank(rank)], strict=True):
                assert torch.equal(ours, true), str(case)
            assert wanted.keys() <= found["grads"].keys()
            for name, grad in wanted.items():
                scale = max(float(grad.abs().max()), 1e-6)
                off = float((found["grads"][name] - grad).abs().max())
                bound = 2e-6 if grad.dtype == torch.float32 else 1e-10  # deepseek_v3 keeps its router in float32
                assert off <= bound * scale, f"{case}: {name} is off by {off:.1e} of {scale:.1e}"
