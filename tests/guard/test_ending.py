"""How a rank ends: one that has given a collective up, and one whose last collective has just come to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from helpers.commands import run_python

PROGRAM = Path(__file__).parents[1] / "helpers" / "rank_that_ends.py"


def start(rank: int, folder: Path, stdin: int | IO[str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), str(rank), str(folder)]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_rank_ends_as_it_wants_to_while_a_peer_ends_that_it_gave_up(tmp_path: Path) -> None:
    giving_up = start(0, tmp_path, subprocess.DEVNULL)
    assert giving_up.stdout is not None
    given_up = start(1, tmp_path, giving_up.stdout)
    try:
        told, errors = given_up.communicate(timeout=60)
        assert (told, given_up.returncode) == ("(1,)\n", 0), errors
        _, errors = giving_up.communicate(timeout=60)
        assert giving_up.returncode == 3, errors
    finally:
        for process in (giving_up, given_up):
            process.kill()
            process.wait()


LATE = """
import atexit, sys, time
import torch
import torch.distributed as dist
import trimtab
from trimtab.guard.guard import Guard
from trimtab.processes import _let_gloo_end

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
MADE
sys.setswitchinterval(100)
# so long that Gloo's thread, not this one, is the last to hold the tensors
dist.all_to_all_single(torch.empty(2**20), torch.ones(2**20), async_op=True)
until = time.monotonic() + 0.3
while time.monotonic() < until:  # all the while the thread that is done with it waits for Python
    pass
"""
MADE = (
    "made = trimtab.AllToAll(dist.group.WORLD)",
    "made = trimtab.AllToAll(dist.group.WORLD, guard=False)",
    "made = Guard().join(dist.group.WORLD)",
)


@pytest.mark.parametrize("made", MADE)
def test_a_rank_ends_well_whose_last_tensors_are_not_freed_yet(made: str) -> None:
    ended = run_python("-c", LATE.replace("MADE", made))
    assert ended.returncode == 0, ended.stderr
