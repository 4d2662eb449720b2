"""A process that is killed anywhere in a save leaves the last whole checkpoint, and the next save goes on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forks import start
from helpers.reshard_case import Model
from trimtab.checkpoint import latest, load, read_tensors, resolve, save
from trimtab.checkpoint.folder import unfinished_checkpoints, whole_checkpoints
from trimtab.errors import InputError

PLACES: dict[str, Callable[[str, tuple[Any, ...]], bool]] = {
    "before the folder": lambda event, args: event == "os.mkdir" and "step-00000003" in str(args[0]),
    "before the data": lambda event, args: event == "open" and str(args[0]).endswith(".distcp"),
    "before the data's index": lambda event, args: event == "open" and str(args[0]).endswith(".metadata.tmp"),
    "before a rank's own file": lambda event, args: event == "open" and "rank-00000" in str(args[0]),
    "before our index": lambda event, args: (
        event == "open" and str(args[0]).endswith("trimtab.json") and "w" in args[1]
    ),
    "before the name": lambda event, args: event == "os.rename" and str(args[1]).endswith("step-00000003"),
    "while an old one goes": lambda event, args: event == "os.rename" and str(args[0]).endswith("step-00000001"),
    "in the old one": lambda event, args: event == "shutil.rmtree" and "step-00000001" in str(args[0]),
}
"""Where to kill, by what Python reports just before it happens (sys.addaudithook)."""


def model_and_optimizer(value: float) -> tuple[Model, torch.optim.Optimizer]:
    """A model whose parameters are all `value`, and Adam after a step of gradients of that."""
    model = Model()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            param.grad = param.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    optimizer.step()
    return model, optimizer


def save_and_die(root: Path, place: str) -> None:
    """Save steps 1 and 2 (keeping both), then step 3 (keeping two) up to the place."""
    for step in (1, 2):
        save(root, *model_and_optimizer(step), step=step)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if PLACES[place](event, args):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(root, *model_and_optimizer(3), step=3, keep=2)


@pytest.mark.parametrize("place", PLACES)
def test_killed_in_a_save(tmp_path: Path, place: str) -> None:
    process = start(save_and_die, tmp_path, place)
    process.join(150)
    assert process.exitcode == -signal.SIGKILL

    renamed = "old one" in place
    steps = [2, 3] if renamed else [1, 2]
    if place == "while an old one goes":
        steps = [1, 2, 3]
    assert [p.name for p in whole_checkpoints(tmp_path)] == [f"step-0000000{s}" for s in steps]
    left = [p.name for p in unfinished_checkpoints(tmp_path)]
    assert left == ([] if len(steps) == 3 or "folder" in place else [f"step-0000000{1 if renamed else 3}.unfinished"])

    model, optimizer = model_and_optimizer(9)
    loaded = load(tmp_path, model, optimizer)
    assert loaded.folder == latest(tmp_path) == resolve(tmp_path)
    assert loaded.index.step == steps[-1]
    for param in model.parameters():
        assert (param == steps[-1]).all()
        assert torch.allclose(optimizer.state[param]["exp_avg"], torch.full_like(param, 0.1 * steps[-1]))
    for name in left:
        with pytest.raises(InputError, match=r"not written to the end|not a whole checkpoint"):
            load(tmp_path / name, model)

    save(tmp_path, *model_and_optimizer(4), step=4)
    assert unfinished_checkpoints(tmp_path) == []
    assert read_tensors(resolve(tmp_path), ["model.seen"])["model.seen"].tolist() == [0, 0, 0]
