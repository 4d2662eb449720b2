"""A run that goes on is the run that never stopped: every number and every bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train.forked import run_forked
from trimtab.checkpoint import read_tensors
from trimtab.errors import ConfigError, InputError, TrimtabError
from trimtab.train.checks import check_options
from trimtab.train.config import TrainConfig
from trimtab.train.resume import check_resume, read_metrics_until, resumed


def numbers(out: Path) -> list[dict[str, Any]]:
    """The metrics without the times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


@pytest.fixture(scope="module")
def config(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Four steps of two batches on each of two ranks; attention drops out, so that random numbers are drawn."""
    model = tmp_path_factory.mktemp("dropout") / "model"
    shutil.copytree(checkpoint, model)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "attention_dropout": 0.3}))
    return TrainConfig(
        model=str(model), data=(str(text),), seq_len=32, batch_size=1, grad_accum=2, max_steps=4, lr=0.01,
        out=str(tmp_path_factory.mktemp("runs") / "whole"), save_every=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(config: TrainConfig) -> Path:
    """The run that never stops, with checkpoints of steps 2 and 4."""
    run_forked(config, 2)
    return Path(config.out)


def test_two_and_two_steps_are_four(config: TrainConfig, whole: Path) -> None:
    out = whole.with_name("parts")
    run_forked(replace(config, out=str(out), save_every=None, stop_after=2), 2)
    assert [line["step"] for line in numbers(out)] == [1, 2]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert not (out / "final").exists()
    with (out / "metrics.jsonl").open("a") as file:  # a step that no checkpoint has, and half of another
        file.write(json.dumps({"step": 3, "loss": 0.0, "layers": {}}) + '\n{"step": 4, "lo')

    run_forked(resumed({"resume": str(out), "save_every": 2}), 2)
    assert numbers(out) == numbers(whole)
    ours, theirs = (read_tensors(folder / "checkpoints" / "step-00000004") for folder in (out, whole))
    assert ours.keys() == theirs.keys()
    assert sum(key.startswith("optim.") for key in ours) == 3 * sum(key.startswith("model.") for key in ours)
    assert max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in ours) == 0
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (out, whole)]
    assert weights[0] == weights[1]


def test_ranks_may_share_the_experts_otherwise(config: TrainConfig, whole: Path) -> None:
    given = {"resume": str(whole / "checkpoints" / "step-00000002"), "out": str(whole.with_name("other")), "ep": 1}
    run_forked(resumed(given | {"save_every": 2, "keep": 1}), 2)
    ours, theirs = numbers(Path(given["out"])), numbers(whole)
    assert ours[:2] == theirs[:2]
    assert [line["step"] for line in ours] == [1, 2, 3, 4]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert mine["layers"] == other["layers"]


@pytest.fixture
def half(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run, as it was after two steps."""
    shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000004")
    return tmp_path / "half"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"seq_len": 64}, ["--seq-len 64", "32"]),
        ({"batch_size": 2}, ["--batch-size 2", "has 1"]),
        ({"grad_accum": 1}, ["--grad-accum 1", "has 2"]),
        ({"max_steps": 8}, ["--max-steps 8", "has 4", "--stop-after"]),
        ({"lr": 0.1}, ["--lr 0.1", "0.01"]),
        ({"warmup": 3}, ["--warmup 3", "has 0"]),
        ({"seed": 1}, ["--seed 1", "has 0"]),
        ({"dtype": "bfloat16"}, ["--dtype bfloat16", "float32"]),
        ({"model": "olmoe"}, ["--model olmoe", "dropout"]),
        ({"data": (__file__,)}, ["--data", "1 file(s)", "6 of"]),
        ({"nproc": 1}, ["2 rank(s)", "1 would now", "--nproc"]),
        ({"stop_after": 2}, ["step 2 is taken"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_what_must_not_change_is_refused(half: Path, given: dict[str, Any], parts: list[str]) -> None:
    world = given.get("nproc", 2)
    with pytest.raises(ConfigError) as error:
        check_resume(resumed({"resume": str(half)} | {k: v for k, v in given.items() if k != "nproc"}), world)
    for part in parts:
        assert part in str(error.value)


def test_what_may_change(half: Path, text: Path) -> None:
    moved = half / "moved"
    shutil.copytree(text, moved)
    config = resumed({"resume": str(half / "checkpoints"), "data": (str(moved),), "ep": 1, "stop_after": 3, "lr": 0.01})
    check_resume(config, 2)
    assert (config.out, config.ep, config.stop_after, config.save_every) == (str(half), 1, 3, 2)
    with pytest.raises(ConfigError, match="say with --out"):
        resumed({"resume": str((half / "checkpoints" / "step-00000002").rename(half / "step-00000002"))})


def test_metrics_up_to_a_checkpoint(half: Path) -> None:
    folder, metrics = half / "checkpoints" / "step-00000002", half / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert read_metrics_until(folder, 2) == lines[:2]
    for left, words in (([lines[0]], "ends with step 1"), ([lines[0], lines[3]], "ends with step 1")):
        metrics.write_text("".join(left))
        with pytest.raises(InputError, match=words):
            read_metrics_until(folder, 2)
    metrics.write_text(lines[0] + lines[0])
    with pytest.raises(InputError, match="after step 1 comes step 1"):
        read_metrics_until(folder, 2)
    metrics.unlink()
    assert read_metrics_until(folder, 2) == []


def test_a_new_run_does_not_overwrite_checkpoints(config: TrainConfig, half: Path) -> None:
    with pytest.raises(TrimtabError, match=r"up to step-00000002; go on with it by --resume"):
        check_options(replace(config, out=str(half)), 2)
    (half / "checkpoints" / "step-00000002" / "trimtab.json").unlink()
    check_options(replace(config, out=str(half)), 2)
    with pytest.raises(InputError, match="step-00000002 was not written to the end"):
        resumed({"resume": str(half)})
