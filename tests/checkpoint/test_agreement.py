"""Ranks that see or hold different things find out together: none loads alone, none waits for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trimtab.checkpoint import load, save
from trimtab.errors import InputError
from trimtab.verify.ranks import run_ranks


def on_rank(root: str) -> tuple[str, str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    paths = [save(root, model, step=step) for step in (1, 2)]
    before = model.weight.clone()
    with pytest.raises(InputError) as seen:
        load(paths[dist.get_rank()], model)
    assert torch.equal(model.weight, before)
    uneven = nn.Module()
    mesh = init_device_mesh("cpu", (2,))
    local = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], shape=torch.Size((3, 2)), stride=(2, 1))
    uneven.weight = nn.Parameter(local)
    with pytest.raises(InputError) as held:
        save(root, uneven, step=3)
    return str(seen.value), str(held.value)


def test_ranks_that_differ(tmp_path: Path) -> None:
    said = run_ranks(on_rank, 2, str(tmp_path), deadline=90.0)
    for seen, held in said:
        assert "rank 0: step-00000001, rank 1: step-00000002" in seen
        assert "weight" in held
