"""Each subcommand from end to end on a tiny case, in real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.train import train_task
from helpers.records import record

QUICK = ["--turns", "1", "--seconds", "0.01", "--malloc", "default"]
TINY = ["--shape", "32,16,4,2", "--tokens", "16", *QUICK]


def bench(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "found.json"
    code = main([*options, "--json", str(path)])
    (found,) = json.loads(path.read_text())["records"]
    return code, found


def timed(record: dict[str, Any]) -> dict[str, set[str]]:
    """Contestant -> modes with at least one positive time."""
    entries = record["races"][0]["entries"]
    return {e["name"]: {m for m, turns in e["seconds"].items() if turns[0][0] > 0} for e in entries}


def test_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = bench(tmp_path, "layer", *TINY, "--dtype", "fp32", "--in-place", "--workloads", "hot")
    modes = {"forward", "forward+backward"}
    assert code == 0
    assert timed(found) == {"trimtab auto": modes, "dense fp32": modes, "copy": {"copy"}}
    assert found["races"][0]["fewest_bytes"]["hot"]["forward"] > 0
    assert "x limit" in capsys.readouterr().out


def test_recorded_command_has_no_paths_of_the_machine(tmp_path: Path) -> None:
    chart = f"--chart={tmp_path / 'drawn.png'}"
    _, found = bench(tmp_path, "layer", *TINY, "--dtype", "fp32", "--modes", "forward", chart)
    assert found["command"] == " ".join(["python -m benchmarks layer", *TINY, "--dtype fp32 --modes forward"])


def test_kernels(tmp_path: Path) -> None:
    code, found = bench(tmp_path, "kernels", *TINY, "--dtype", "fp32", "--kernels", "loop")
    products = {"experts forward", "experts backward", "grouped_mm", "grouped_wgrad"}
    assert code == 0
    assert timed(found) == {
        "trimtab loop": products | {"gather"},
        "trimtab rows and plans": {"combine", "plan of one rank", "plan of 8 ranks"},
        "dense fp32": products,
        "copy": {"gather", "combine"},
    }


def test_exchange(tmp_path: Path) -> None:
    code, found = bench(tmp_path, "exchange", *TINY, "--dtype", "bf16", "--ranks", "2", "--transports", "alltoall",
                        "--workloads", "source_ragged")  # fmt: skip
    modes = {"forward", "forward+backward"}
    assert code == 0
    assert timed(found) == {"trimtab alltoall": modes, "raw all-to-all + copy": modes}


def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, found = bench(tmp_path, "train", *QUICK, "--batch-size", "1", "--seq-len", "8")
    assert code == 0
    assert timed(found) == {"trimtab": {"step"}}
    assert found["case"]["tokens_per_step"] == 8


@pytest.mark.usefixtures("as_of_now")
def test_all_of_it_is_shown_without_a_picture_where_nothing_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = record()
    measured.settings["took"] = 1.0
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("benchmarks.__main__._measure", lambda task, options: measured)
    places = ["--out", str(tmp_path / "docs"), "--results", str(tmp_path / "results")]
    assert main(["all", "--quick", "--only", "kernels", "fp32", *places]) == 0
    assert "no picture: no chart without matplotlib: pip install" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "docs").iterdir()] == ["benchmarks.md"]


def test_training_steps_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["train"]) == 2
    assert "benchmarks train needs transformers (pip install 'trimtab[hf]')" in capsys.readouterr().err
    task = train_task("qwen3_moe", ranks=1, folder=tmp_path)
    assert task.prepare is not None
    task.prepare()  # among all cases, its contestants say why


def test_what_cannot_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, message in (
        (["layer", "--peers", "all_to_all"], "peer 'all_to_all' does not race on 1 rank(s)"),
        (["layer", "--ranks", "3"], "64 experts do not divide over 3 ranks"),
        (["layer", "--family", "gpt_oss", "--ranks", "2"], "--family gpt_oss: races on one rank"),
        (["layer", "--turns", "0"], "--turns must be at least 1"),
        (["layer", "--seconds", "nan"], "--seconds and --patience more than 0, and numbers"),
        (["layer", "--seconds", "inf"], "--seconds and --patience more than 0, and numbers"),
        (["layer", "--chart", "times.svg"], "times.svg: a chart is a .png"),
        (["layer", "--chart", "/dev/null/times.png"], "/dev/null/times.png: cannot be written"),
        (
            ["layer", "--json", "/dev/null/times.json"],
            "/dev/null/times.json: cannot be written (/dev/null is no folder)",
        ),
        (["layer", "--tokens", "0"], "--tokens 0: each must be at least 1"),
        (["layer", "--threads", "1", "100000"], "--threads 100000: this process has "),
        (["layer", "--kernels", "auto", "lop"], "--kernels lop: must be one of auto, compiled, loop, stock"),
        (["kernels", "--kernels", "lop"], "--kernels lop: must be one of auto, compiled, loop, stock"),
        (["layer", "--ranks", "2", "--transports", "x"], "--transports x: must be one of alltoall, allgather, shared"),
        (["exchange", "--transports", "x"], "--transports x: must be one of alltoall, allgather, shared"),
        (["train", "--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["train", "--seq-len", "-1"], "--seq-len -1: must be at least 1"),
        (["exchange", "--ranks", "1"], "at least 2 ranks"),
        (["train", "--preset", "gpt5"], "--preset gpt5: must be one of qwen3_moe"),
        (["train", "--peers", "eager"], "there is only stock"),
        (["all", "--only", "layer", "zzz"], "--only layer zzz: no case has all these words in its name, such as layer"),
        (["all", "--only", "zzz", "--list"], "--only zzz: no case has all these words in its name"),
        (["all", "--quick", "--turns", "0", "--out", "/dev/null/docs"], "/dev/null/docs/benchmarks.png: cannot be"),
        (["page", "absent.json", "--out", "x.md"], "absent.json: cannot be read"),
    ):
        assert main([*options]) == 2
        assert message in capsys.readouterr().err
