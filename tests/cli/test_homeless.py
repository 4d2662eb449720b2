"""No home, none that can be written, no compiler that works, no NumPy: commands and a forward run, and say so once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.commands import run_python

FORWARD = """
import torch, trimtab
router = trimtab.RouterConfig(num_experts=4, top_k=2)
for _ in range(2):
    trimtab.MoEConfig(dim=8, hidden=8, router=router).build()(torch.randn(3, 8))[0].sum().backward()
"""
TRAIN = "train --model mixtral --data data.txt --max-steps 1 --batch-size 1 --seq-len 32 --out run"
COMMANDS = {
    "forward": ["-c", FORWARD],
    "doctor": ["-m", "trimtab", "doctor"],
    "verify": ["-m", "trimtab", "verify", "--quick", "--only", "2r-ep2/zipf1/float32"],
    "train": ["-m", "trimtab", *TRAIN.split()],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("home", ["/proc/nothing", "a file", ""])
def test_without_a_home_and_a_compiler_that_works(command: str, home: str, tmp_path: Path) -> None:
    for path, text in (("file", ""), ("data.txt", "a line of words\n" * 90), ("bin/c++", "#!/bin/sh\nexit 1\n")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "bin/c++").chmod(0o755)
    known = {k: v for k, v in os.environ.items() if k not in ("CXX", "XDG_CACHE_HOME", "HF_HOME", "HOME")}
    environment = known | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"HOME": str(tmp_path / "file") if home == "a file" else home, "TMPDIR": str(tmp_path)}
    if home == "":
        environment["XDG_CACHE_HOME"] = "/proc/nothing"
    done = run_python(*COMMANDS[command], cwd=tmp_path, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not any(words in said for words in ("Traceback", "Matplotlib", "mkdir -p failed"))
    lines = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    assert len(lines) == (command != "doctor"), lines  # which has it in its table
    assert all("the C++ compiler failed" in line for line in lines)
    assert " ".join(said.split()).count("exit code 1, and not a word") == 1


@pytest.mark.parametrize("command", ["doctor", "verify"])
def test_without_numpy_torch_s_warning_of_it_is_not_repeated(command: str, tmp_path: Path) -> None:
    """A stand-in warns as torch does where NumPy is missing: at its import, in every process."""
    script = (
        "import sys, warnings\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Without(MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            warnings.warn('Failed to initialize NumPy: No module named numpy', UserWarning)\n"
        "sys.meta_path.insert(0, Without())\n"
        "sys.modules['numpy'] = None\n"
    )
    (tmp_path / "sitecustomize.py").write_text(script)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = run_python(*COMMANDS[command], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "NumPy" not in done.stdout + done.stderr
    bare = run_python("-c", "import torch", env=environment)
    assert "Failed to initialize NumPy" in bare.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--verison", "unrecognized arguments: --verison (see trimtab --help)"),
        ("convert --verison", "unrecognized arguments: --verison (see trimtab convert --help)"),
        ("convert src dst --ot=dcp", "unrecognized arguments: --ot=dcp (see trimtab convert --help)"),
        ("convert a --layuot x b", "unrecognized arguments: --layuot (see trimtab convert --help)"),
        ("train --verison", "unrecognized arguments: --verison (see trimtab train --help)"),
        ("doctor --place", "unrecognized arguments: --place (see trimtab doctor --help)"),
        ("verify --quik", "unrecognized arguments: --quik (see trimtab verify --help)"),
        ("", "the following arguments are required: COMMAND (see trimtab --help)"),
        ("convert src --to dcp", "the following arguments are required: DST (see trimtab convert --help)"),
    ],
)
def test_an_option_that_is_not_known_is_named_before_what_is_missing(given: str, says: str) -> None:
    done = run_python("-m", "trimtab", *given.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"trimtab: {says}\n")
