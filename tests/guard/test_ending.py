"""How a rank ends that has given a collective up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

PROGRAM = Path(__file__).parent / "rank_that_ends.py"


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
