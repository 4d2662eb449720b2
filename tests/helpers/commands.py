"""The command as a user runs it, with a deadline, and what to watch while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE = 240.0
"""Seconds after which a command counts as hanging, on a busy machine."""


KILL = """
import os, signal, sys

def hook(event, args):
    if event == "os.rename" and str(args[1]).endswith({name!r}):
        os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == {rank!r}:
    sys.addaudithook(hook)
"""


def _environment(start: Path | None = None) -> dict[str, str]:
    own = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    paths = [str(start), *filter(None, [own.get("PYTHONPATH")])]
    return own if start is None else {**own, "PYTHONPATH": os.pathsep.join(paths)}


def with_tests(more: dict[str, str]) -> dict[str, str]:
    """This process's environment and `more`, with `faults`, `fuzz` and `benchmarks` on the path."""
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(paths)}


def killed_at_rename(folder: Path, name: str, rank: int) -> Path:
    """A folder for `start`: in it is what kills this rank just before it gives something that name."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(KILL.format(name=name, rank=str(rank)))
    return folder


def start_cli(*arguments: object, start: Path | None = None, nohup: bool = False) -> subprocess.Popen[str]:
    """Start `trimtab …` as a user would, and return at once. start: of Python modules that are found first."""
    command = [*(["nohup"] if nohup else []), sys.executable, "-m", "trimtab", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=_environment(start))


def run_cli(*arguments: object, start: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `trimtab …` to its end."""
    return finish(start_cli(*arguments, start=start))


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run another Python process to its end. options: of `subprocess.run`."""
    given = {"capture_output": True, "text": True, "env": _environment(), "timeout": DEADLINE, "check": False}
    return subprocess.run([sys.executable, *map(str, arguments)], **given | options)


def torchrun(*command: object, ranks: int = 2) -> str:
    """What ranks print that run from the repository's root; they must end well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*launcher, *map(str, command)], cwd=root, capture_output=True, text=True, timeout=DEADLINE, check=False,
        env=_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


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
            if b"trimtab.train.launch" in command and str(out).encode() in command:
                found.append(int(entry.name))
    return sorted(found)


def wait_for(condition: Callable[[], bool], living: subprocess.Popen[str] | None = None) -> None:
    """Poll until the condition holds. `living`: the process that brings it about."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert living is None or living.poll() is None, finish(living).stderr
        assert time.monotonic() < end, "deadline passed"
        time.sleep(0.05)
