"""SIGTERM ends a command as Ctrl-C does: its processes are gone, its folders removed, and it says one word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import with_tests


def within(seconds: float, true: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def group_is_gone(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    "command",
    [
        ("benchmarks", "layer", "--shape", "64,32,4,2", "--tokens", "64", "--seconds", "100"),
        ("trimtab", "verify", "--quick", "--out", "out"),
    ],
    ids=" ".join,
)
def test_sigterm_leaves_nothing_behind(command: tuple[str, ...], tmp_path: Path) -> None:
    folders = tmp_path / "tmp"
    folders.mkdir()
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}  # torch's, which it leaves
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=tmp_path, env=with_tests({**caches, "TMPDIR": str(folders)}), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert within(60, lambda: any(folders.iterdir())), "no folder to remove"
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, said
        assert said.endswith("trimtab: interrupted\n")
        assert within(10, lambda: group_is_gone(process.pid))
        assert not any(folders.iterdir())
    finally:
        if not group_is_gone(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
