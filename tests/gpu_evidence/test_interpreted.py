"""The numbers of the kernels between grouped GEMMs, in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.commands import with_tests

pytest.importorskip("triton")


def test_numbers_in_the_interpreter() -> None:
    env = with_tests({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    command = [sys.executable, "-m", "gpu_evidence.interpreted"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10
