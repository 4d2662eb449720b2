"""The tests on a GPU say what they found, however they end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.commands import run_python, with_tests

ROOT = Path(__file__).parents[3]
TESTS = """
import os, signal, sys
import torch

def test_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: {broken})
    monkeypatch.setattr(sys.modules["conftest"], "answers", lambda: False)
    assert not "what was found"

def test_hangs():
    print("device hangs")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("broken", [False, True])
def test_a_failure_is_said_at_once_and_a_broken_device_ends_the_run(broken: bool, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", tmp_path)
    (tmp_path / "test_device.py").write_text(TESTS.format(broken=broken))
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = run_python(*options, "test_device.py", cwd=tmp_path, env=with_tests({}))
    assert "test_fails: AssertionError: assert not 'what was found'" in done.stdout.splitlines()
    assert ("the device answers nothing more" in done.stdout) == broken
    assert done.returncode == (2 if broken else -9)
