"""A folder for temporary files whose path no socket takes, as job managers and test runners make them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("run", [("--quick", "--only", "2r-ep2/zipf1/float32", "--out", "out"), ("--fuzz", "200")])
def test_a_long_tmpdir(run: tuple[str, ...], tmp_path: Path) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}  # torch's, which it leaves
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "verify", *run],
        cwd=tmp_path, env={**os.environ, **caches, "TMPDIR": str(long)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not any(long.iterdir())
