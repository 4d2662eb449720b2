"""The staged run on a GPU: rehearsed as a whole on a bare machine, and each kind of failure seen for what it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import layers
from benchmarks.gpu.child import Measuring
from benchmarks.gpu.page import BAR, DEFAULT, FUSED, decision
from benchmarks.gpu.run import Outcome, code_of, run_stages
from benchmarks.gpu.stages import STAGES, Stage
from benchmarks.layer_case import expert_weights
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.torch_mm import GroupedMMBackend

ROOT = Path(__file__).parents[2]
NEEDED = (
    "torch", "triton", "pytest", "pluggy", "iniconfig", "packaging", "pygments", "numpy", "typing_extensions", "sympy",
    "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec",
)  # fmt: skip
"""torch, Triton, pytest, and what these need; beside them what torch loads from NVIDIA's packages."""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The interpreter of an environment that has `NEEDED` and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (into,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    for own in distributions():
        if own.name.lower().replace("-", "_") in NEEDED or own.name.startswith(("nvidia", "cuda")):
            for name in {file.parts[0] for file in own.files or () if file.parts[0] not in ("..", "__pycache__")}:
                if not (into / name).is_symlink():
                    (into / name).symlink_to(str(own.locate_file(name)))
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_whole_run_on_a_bare_machine_in_a_copy_of_the_tree(bare: Path, tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    for name in ("src", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    command = [bare, "-m", "benchmarks", "gpu", "--device", "cpu", "--minutes", "8", "--out", out]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": "src", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["stage"]: one for one in json.loads((out / "run.json").read_text())["outcomes"]}
    wanted = {stage.name: "ok" for stage in STAGES}
    if shutil.which("compute-sanitizer") is None:
        wanted["memcheck"] = "skipped"
    assert {name: one["status"] for name, one in found.items()} == wanted
    for name, one in found.items():
        assert f"{name}: {one['status']}" in done.stdout
        assert one["verdict"] in (page := (out / "gpu.md").read_text())
    assert "Revision unknown (a copy of the tree)" in page
    assert "Not decided: a rehearsal on the CPU." in page
    assert "transformers grouped_mm | ModuleNotFoundError" in page
    assert "not counted on the CPU" in page
    rows = json.loads((out / "4_layers.json").read_text())["rows"]
    assert {row["name"] for row in rows if "ms" in row} == {"trimtab torch", "trimtab grouped_mm"}


TESTS = {
    "passes": ("def test_it(): pass", "1 passed"),
    "fails": (
        "def test_wrong_kernel(): assert 1 == 2, 'another number'",
        "1 failed, exit code 1, see 0_tests_fails.txt",
    ),
    "crashes": ("import os\ndef test_crashes(): os.abort()", "nothing, died of SIGABRT"),
    "hangs": ("import time\ndef test_hangs(): time.sleep(600)", "nothing, stopped at its limit"),
    "skips": ("import pytest\ndef test_skips(): pytest.skip('nothing to see')", "1 skipped, no result"),
}
"""Name -> its text, and what is said of it."""
MEASURES = """
import time

def wrong(run):
    run.save(wrong=["the fused kernel"])
    return "measured"

def dies(run):
    run.save(rows=["kept"])
    raise RuntimeError("out of luck")

def hangs(run):
    time.sleep(600)

def well(run):
    return f"on {run.device}"
"""


def test_each_kind_of_failure_is_seen_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, (text, _) in TESTS.items():
        (tmp_path / f"test_gpu_{name}.py").write_text(text)
    (tmp_path / "planted_stages.py").write_text(MEASURES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out, files = tmp_path / "out", tuple(str(tmp_path / f"test_gpu_{name}.py") for name in TESTS)
    stages = [
        Stage(name="tests", about="", limit=10, tests=files),
        *(Stage(name=name, about="", limit=8 if name == "hangs" else 60, measure=f"planted_stages:{name}")
          for name in ("wrong", "dies", "hangs", "well")),
        Stage(name="sanitizer", about="", limit=5, tests=files, under=("no-such-command",)),
    ]  # fmt: skip
    found = {one.stage: one for one in run_stages(stages, out, "cpu", 300)}
    assert {name: one.status for name, one in found.items()} == {
        "tests": "failed", "wrong": "failed", "dies": "broken", "hangs": "broken", "well": "ok", "sanitizer": "skipped",
    }  # fmt: skip
    for name, (_, said) in TESTS.items():
        assert f"{name}: {said}" in found["tests"].verdict, name
    assert "another number" in (out / "0_tests_fails.txt").read_text()
    assert "test_crashes" in (out / "0_tests_crashes.txt").read_text()
    assert "in test_hangs" in (out / "0_tests_hangs.txt").read_text()
    assert found["wrong"].verdict == "measured; wrong: the fused kernel"
    assert "RuntimeError: out of luck" in (out / "2_dies.txt").read_text()
    assert json.loads((out / "2_dies.json").read_text()) == {"rows": ["kept"]}
    assert "in hangs" in (out / "3_hangs.txt").read_text()
    assert found["hangs"].seconds < 25
    assert found["well"].verdict == "on cpu"
    assert found["well"].verdict in (out / "gpu.md").read_text()
    assert "out of luck" in capfd.readouterr().out


def test_the_time_is_shared_out_and_the_code_says_what_happened(tmp_path: Path) -> None:
    late = Stage(name="late", about="", limit=60, measure="nothing:here")
    (outcome,) = run_stages([late], tmp_path, "cpu", 1)
    assert (outcome.status, outcome.verdict) == ("broken", "not run: no time was left")
    one = {"stage": "", "verdict": "", "seconds": 0.0}
    for statuses, code in ((("ok", "skipped"), 0), (("broken", "ok"), 3), (("broken", "failed"), 1)):
        assert code_of([Outcome(status=status, **one) for status in statuses]) == code  # type: ignore[arg-type]


class Wrong(GroupedMMBackend):
    """Right forward, and for as few rows as a self-test has."""

    def grouped_wgrad(self, a_RA: torch.Tensor, b_RB: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().grouped_wgrad(a_RA * 1.2 if a_RA.shape[0] > 24 else a_RA, b_RB, *args, **kwargs)


def test_wrong_numbers_do_not_race(tmp_path: Path) -> None:
    run = Measuring(device="cpu", seconds=60, path=tmp_path / "found.json")
    ((_, case), *_) = layers.cases("cpu")

    def make(name: str, *given: Any) -> Any:
        if name == "dies":
            raise RuntimeError("no such kernel")
        made = layers.alone(case, KernelChoice(Wrong()) if name == "wrong" else "torch", given[2])
        return layers.layer_subject(*(made[0], case, 0, made[1], given[1]))

    rows = {row["name"]: row for row in layers.race(run, ["right", "wrong", "dies"], case, expert_weights(case), make)}
    assert rows["right"]["ms"]["forward+backward"] > 0
    assert "wrong numbers, not raced: gate and up gradient is off by" in rows["wrong"]["failed"]
    assert rows["dies"]["failed"] == "RuntimeError: no such kernel"
    assert rows["wrong"]["wrong"]
    assert "ms" not in rows["wrong"]


def found(*ratios: float | None, kernels: str = "ok") -> str:
    """What is decided where the fused products are so many times faster, shape by shape; None: they did not race."""
    rows: list[dict[str, Any]] = []
    for shape, ratio in zip(layers.SHAPES, ratios, strict=False):
        for name, ms in ((DEFAULT, 10.0), (FUSED, None if ratio is None else 10.0 / ratio)):
            row = {"shape": shape, "tokens": layers.TOKENS[-1], "name": f"trimtab {name}"}
            rows.append(row if ms is None else {**row, "ms": {"forward+backward": ms}})
    outcomes = [{"stage": "kernels", "status": kernels}, {"stage": "layers", "status": "ok"}]
    return decision({"device": "cuda", "outcomes": outcomes}, {"layers": {"rows": rows}})


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (lambda: found(BAR, 2.0, 1.3), "They stay, and are the faster choice"),
        (lambda: found(1.1, 1.2, 0.9), "They go: 1.10 (Qwen3-30B-A3B), 1.20 (Mixtral-8x7B), 0.90 (DeepSeek-V3)"),
        (lambda: found(1.1, 2.0, 2.0), "They stay an option by name"), (lambda: found(2.0, 2.0, None), "Not decided"),
        (lambda: found(2.0, 2.0), "Not decided"), (lambda: found(2.0, 2.0, 2.0, kernels="failed"), "Not decided"),
        (lambda: found(2.0, 2.0, 2.0, kernels="broken"), "Not decided"),
    ],
)  # fmt: skip
def test_the_rule(said: Callable[[], str], word: str) -> None:
    assert said().startswith(word), said()
