"""Output that somebody else reads: in an encoding of theirs, and for as long as they like."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_without_some_characters(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "train", "--help"],
        env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2026" in done.stdout


def test_a_reader_that_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    script = "import sys; from trimtab.cli import main; main._main = lambda _: print('a line'); sys.exit(main.main())"
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
