"""Ranks that see or hold different things find out together: none loads alone, none waits for the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trimtab.checkpoint import load, save
from trimtab.checkpoint.folder import whole_checkpoints
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


def on_a_host_of_its_own(root: str) -> tuple[str, list[Path]]:
    os.chdir(Path(root) / str(dist.get_rank()))
    with pytest.raises(InputError) as refused:
        save("run", nn.Linear(3, 3), step=1)
    return str(refused.value), whole_checkpoints("run")


def test_files_on_another_hosts_disk_make_no_checkpoint(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for said, whole in run_ranks(on_a_host_of_its_own, 2, str(tmp_path), deadline=90.0):
        assert "rank(s) 1 wrote elsewhere: __1_0.distcp is not there; save to a folder that all hosts share" in said
        assert whole == []
