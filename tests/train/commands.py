"""The command as a user runs it, with a deadline, and what to watch while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE = 150.0
"""Seconds after which a command counts as hanging, on a busy machine."""


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start_cli(*arguments: object) -> subprocess.Popen[str]:
    """Start `trimtab …` as a user would, and return at once."""
    command = [sys.executable, "-m", "trimtab", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())


def run_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `trimtab …` to its end."""
    return finish(start_cli(*arguments))


def run_python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run another Python process to its end."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=DEADLINE, check=False)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a started command; one that passes the deadline is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def ranks_of(out: Path) -> list[int]:
    """Process ids of the ranks that train into `out`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"trimtab.train.rank" in command and str(out).encode() in command:
                found.append(int(entry.name))
    return sorted(found)


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "deadline passed"
        time.sleep(0.05)


def first_step_done(out: Path) -> Callable[[], bool]:
    """The condition that a run has written its first line of metrics."""
    metrics = out / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.stat().st_size > 0
