"""The server that ranks are forked from: what they inherit, and a folder for temporary files whose path no socket
takes, as job managers and test runners make them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.errors import BackendError
from trimtab.kernels import compiled
from trimtab.verify.ranks import run_ranks


def inherited() -> list[str | None]:
    """What was found wrong with the kernels before this rank began."""
    kernels = compiled._shared.get("cpu")
    return ["there are none"] if kernels is None else kernels._found


def test_ranks_inherit_tested_kernels() -> None:
    try:
        compiled.compiled_kernels()  # the server compiles none
    except BackendError as error:
        pytest.skip(str(error))
    assert run_ranks(inherited, 2) == [[None], [None]]


def test_no_server_is_ended_by_kernels_nor_waits_for_a_compiler(tmp_path: Path) -> None:
    """In processes of their own, as the server imports the module."""
    cases = (
        "compiled.compiled_kernels = lambda: os.kill(os.getpid(), 11); compiled.are_made = lambda: True",
        "compiled.compiled_kernels = lambda: 1 / 0; compiled.are_made = lambda: True",
        f"os.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r}",
        "os.environ['CXX'] = 'no such'",
    )
    for change in cases:
        script = (
            f"import os, torch; from trimtab.kernels import compiled; torch.set_num_threads(2); {change}; "
            "from trimtab.verify.tested_kernels import KEPT; print(KEPT, torch.get_num_threads())"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "[] 2\n", change
    assert not list(tmp_path.iterdir())


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
