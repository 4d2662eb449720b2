"""The numbers of the Triton kernels, in Triton's interpreter. tests/gpu runs them where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.triton_checks import FALLS


def test_numbers_in_the_interpreter() -> None:
    tests = Path(__file__).parents[2]
    found = os.pathsep.join([str(tests.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.triton_interpreted"],
        cwd=tests, env=env, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 * len(FALLS) + 5
