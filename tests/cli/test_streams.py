"""What no command takes; and output that somebody else reads: in an encoding of theirs, for as long as they like."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.commands import run_python
from trimtab.cli.main import build_parser

CLOSED = "import os, sys; os.close({}); os.execv(sys.executable, sys.argv[1:])"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_without_some_characters(encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = run_python("-m", "trimtab", "train", "--help", env=environment, text=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2026" in done.stdout


def test_a_reader_that_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    for flush in (False, True):
        script = (
            "import sys; from trimtab.cli import doctor, main\n"
            f"def run(_): print('a line', flush={flush}); return 0\n"
            "doctor.run = run; sys.exit(main.main(['doctor']))"
        )
        done = run_python("-c", script, capture_output=False, stdout=write, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (141, "")
    os.close(write)


def test_a_pipe_of_the_command_s_own_is_an_error_like_others() -> None:
    script = (
        "import sys; from trimtab.cli import doctor, main\n"
        "def run(_): raise BrokenPipeError('a child has died')\n"
        "doctor.run = run; sys.exit(main.main(['doctor']))"
    )
    done = run_python("-c", script)
    said = "trimtab: BrokenPipeError: a child has died (--debug shows where)"
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, said)


def test_diagnostics_that_nobody_wants_are_no_output() -> None:
    done = run_python("-c", CLOSED.format(2), sys.executable, "-m", "trimtab", "train", "--resume", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")


def test_no_output_at_all() -> None:
    done = run_python("-c", CLOSED.format(1), sys.executable, "-m", "trimtab", "doctor", "--trace", "nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr


@pytest.mark.parametrize(
    ("given", "command"),
    [("train --steps 5", "trimtab train"), ("verify --fuzz 9", "trimtab verify"), ("--quick", "trimtab")],
)
def test_whoever_refuses_an_option_names_the_help_that_lists_its_own(
    given: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(given.split())
    assert ended.value.code == 2
    assert f"(see {command} --help)" in capsys.readouterr().err
