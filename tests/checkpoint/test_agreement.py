"""Ranks that see or hold different things find out together: none loads alone, none waits for the others."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from helpers.ranks import run_ranks
from trimtab.checkpoint import load, save
from trimtab.checkpoint.folder import whole_checkpoints
from trimtab.errors import ConfigError, InputError


def on_rank(root: str) -> tuple[str, str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    paths = [save(root, model, step=step) for step in (1, 2)]
    before = model.weight.clone()
    with pytest.raises(InputError) as seen:
        load(paths[dist.get_rank()], model)
    assert torch.equal(model.weight, before)
    summands = nn.Module()
    summands.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Partial()]))
    with pytest.raises(InputError) as held:
        save(root, summands, step=3)
    return str(seen.value), str(held.value)


def test_ranks_that_differ(tmp_path: Path) -> None:
    said = run_ranks(on_rank, 2, str(tmp_path), deadline=90.0)
    for seen, held in said:
        assert "rank 0: step-00000001, rank 1: step-00000002" in seen
        assert "weight is Partial" in held


def other_arguments(root: str) -> dict[str, str]:
    rank, model, said = dist.get_rank(), nn.Linear(3, 3), {}
    optimizer = torch.optim.SGD(model.parameters())
    given: dict[str, Any] = {"root": root, "optimizer": optimizer, "step": 1, "keep": 2}
    other = {"root": f"{root}/{rank}", "optimizer": optimizer if rank else None, "step": 1 + rank, "keep": 2 + rank}
    for name, value in other.items():
        with pytest.raises(InputError) as refused:
            save(model=model, **given | {name: value})
        said[name] = str(refused.value)
    for name, value, match in (
        ("keep", 0, "keep=0 must be"),
        ("rank_extra", {1: Fraction(1, 2)}, "rank_extra: cannot be"),
    ):
        with pytest.raises((ConfigError, InputError), match=f"rank 0: {match}"):
            save(model=model, **given | ({name: value} if rank == 0 else {}))
    return said


def test_ranks_that_hand_in_other_values(tmp_path: Path) -> None:
    first, second = run_ranks(other_arguments, 2, str(tmp_path), deadline=90.0)
    assert first == second
    assert f"root is not the same on all ranks (rank 0: {tmp_path}/0, rank 1: {tmp_path}/1)" in first["root"]
    assert "optimizer is not the same on all ranks (rank 0: none, rank 1: SGD)" in first["optimizer"]
    assert "step is not the same on all ranks (rank 0: 1, rank 1: 2)" in first["step"]
    assert "keep is not the same on all ranks (rank 0: 2, rank 1: 3)" in first["keep"]
    assert not list(tmp_path.iterdir())


def damaged(root: str) -> dict[str, tuple[str, bool]]:
    torch.manual_seed(0)
    model, said = nn.Linear(3, 3), {}
    folder = save(root, model, step=1)
    before = model.weight.clone()
    for name in (".metadata", "rank-00001.pt", "__0_0.distcp"):
        file = folder / name
        whole = file.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(bytes(len(whole)))
        dist.barrier()
        with pytest.raises(InputError) as refused:
            load(root, model)
        said[name] = str(refused.value), torch.equal(model.weight, before)
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(whole)
        dist.barrier()
    load(root, model)
    return said


def test_damaged_files_of_the_right_size(tmp_path: Path) -> None:
    first, second = run_ranks(damaged, 2, str(tmp_path), deadline=90.0)
    assert {name: words for name, (words, _) in first.items()} == {name: words for name, (words, _) in second.items()}
    for name in (".metadata", "rank-00001.pt"):
        words, untouched = first[name]
        assert f"{tmp_path}/step-00000001/{name}: damaged, cannot be read" in words
        assert untouched
    assert f"{tmp_path}/step-00000001: rank 0: damaged, cannot be read" in first["__0_0.distcp"][0]
    for words, _ in first.values():
        assert "copy it again, or take another checkpoint" in words
        assert "weights_only" not in words


def on_a_host_of_its_own(root: str) -> tuple[str, list[Path]]:
    os.chdir(Path(root) / str(dist.get_rank()))
    with pytest.raises(InputError) as refused:
        save("run", nn.Linear(3, 3), step=1)
    return str(refused.value), whole_checkpoints("run")


def test_files_on_another_hosts_disk_make_no_checkpoint(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for said, whole in run_ranks(on_a_host_of_its_own, 2, str(tmp_path), deadline=90.0):
        assert "rank(s) 1 wrote elsewhere: rank-00001.pt is not there; save to a folder that all hosts share" in said
        assert whole == []
