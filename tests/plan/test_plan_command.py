"""The command, its table and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.cli.main import main

TINY = ("--model", "qwen3_moe", "--batch-size", "2", "--seq-len", "32", "--ranks", "2")


def test_the_command_plans_and_says_how_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan"
    assert main(["plan", *TINY, "--gb", "4", "--layouts", "1", "--skew", "zipf", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    found = json.loads((out / "plan.json").read_text())
    assert [(row["fits"], row["ep"]) for row in found["layouts"]] == [(True, 2)]
    assert [row["skew"] for row in found["skew"]] == ["even", "zipf", "worst"]
    even, _, worst = (row["peak"] for row in found["skew"])
    assert worst > even
    for row in found["layouts"]:
        assert row["peak"] == max(sum(parts.values()) for parts in row["stages"].values())
        assert row["at least seconds"] > 0
    assert (out / "plan.png").stat().st_size > 5000
    assert "9 further layouts divide and were not tried" in said
    assert "run     trimtab train --nproc 2 --batch-size 2 --model qwen3_moe --seq-len 32 --ep 2 --fsdp 2" in said


def test_nothing_fits_is_an_exit_code_and_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gb = ["--gb", "0.021", "--device", "cpu", "--ep", "2", "--layouts", "1", "--out", str(tmp_path)]
    assert main(["plan", *TINY, *gb]) == 1
    said = capsys.readouterr().out
    assert "too much: activations" in said
    assert "--gradient-checkpointing" in said
    assert "run  " not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gb", "0"], "must be more than 0"), (["--gb", "1"], "no more than what --device cuda takes"),
        (["--optim", "none"], "--optim none: there is no such optimizer"),
        (["--ep", "3"], "no layout divides them with 16 experts"),
        (["--skew", "steep"], "--skew steep: neither even, worst"), (["--quantize", "nf4"], "goes with --lora"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *TINY, *more, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
