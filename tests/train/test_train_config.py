"""Options and rank arithmetic."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.cli.main import main
from trimtab.errors import ConfigError
from trimtab.train.config import Mesh, TrainConfig


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 4), st.integers(1, 128))
def test_default_mesh_always_fits(fsdp: int, tp: int, replicate: int, experts: int) -> None:
    world = fsdp * tp * replicate
    mesh = Mesh.of(TrainConfig(tp=tp, replicate=replicate), world=world, num_experts=experts)
    assert mesh.replicate * mesh.fsdp * mesh.tp == world
    assert mesh.fsdp * mesh.tp % mesh.ep == 0
    assert experts % mesh.ep == 0
    assert mesh.ep == 1 or mesh.ep % mesh.tp == 0
    larger = range(mesh.ep + 1, fsdp * tp + 1)
    assert not any(n % tp == 0 and fsdp * tp % n == 0 and experts % n == 0 for n in larger)


def test_tp_ranks_read_the_same_data() -> None:
    mesh = Mesh.of(TrainConfig(tp=2, fsdp=2, replicate=2), world=8, num_experts=8)
    assert mesh.data_size == 4
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("options", "world", "arithmetic"),
    [
        ({"fsdp": 3}, 4, "replicate 1 x fsdp 3 x tp 1 = 3 ranks, but there are 4"),
        ({"fsdp": 2, "tp": 2, "replicate": 2}, 4, "= 8 ranks, but there are 4"),
        ({"tp": 3}, 4, "= 3 ranks, but there are 4"),
        ({"ep": 3}, 4, "--ep 3 does not divide fsdp 4 x tp 1 = 4"),
        ({"ep": 3, "tp": 2}, 4, "3 = 1 x 2 + 1"),
        ({"ep": 4, "replicate": 2}, 4, "--ep 4 does not divide fsdp 2 x tp 1 = 2"),
        ({"ep": 4}, 4, "6 = 1 x 4 + 2"),
    ],
)
def test_refuses_with_the_arithmetic(options: dict[str, int], world: int, arithmetic: str) -> None:
    with pytest.raises(ConfigError) as error:
        Mesh.of(TrainConfig(**options), world=world, num_experts=6)
    assert arithmetic in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 0}, {"batch_size": 0}, {"seq_len": 1}, {"lr": 0.0}, {"lr": float("nan")}, {"dtype": "float16"},
        {"replicate_experts": "on"}, {"replicate_experts": "-0.1"}, {"replicate_experts": "inf"}, {"copy_cost": 5},
        {"replicate_experts": "auto", "copy_cost": -1},
    ],
)  # fmt: skip
def test_refuses_senseless_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        TrainConfig(**options)  # type: ignore[arg-type]


def test_replicate_experts_is_a_word_or_a_number() -> None:
    assert [TrainConfig(replicate_experts=given).tolerance for given in ("off", "auto", "0.1")] == ["off", "auto", 0.1]


def test_json_round_trip() -> None:
    config = TrainConfig(data=("a", "b"), ep=2, lr=1e-3).resolved()
    assert TrainConfig.of(json.loads(json.dumps(asdict(config)))) == config
    assert (config.max_steps, config.warmup) == (100, 10)


def test_a_file_holds_options_and_the_command_line_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[TrainConfig, int | None]] = []
    monkeypatch.setattr("trimtab.cli.train.launch", lambda config, nproc: seen.append((config, nproc)))
    file = tmp_path / "run.yaml"
    file.write_text("model: olmoe\ndata: [a.txt, b]\nseq-len: 64\nlr: 2e-5\nnproc: 2\noverwrite: true\nep: null\n")
    assert main(["train", "--seq-len", "32", "--config", str(file), "--grad-accum", "2"]) == 0
    config = TrainConfig(model="olmoe", data=("a.txt", "b"), seq_len=32, lr=2e-5, overwrite=True, grad_accum=2)
    assert seen == [(config, 2)]
    file.write_text(json.dumps(config.made_of()))  # as run.json
    assert main(["train", "--config", str(file), "--overwrite"]) == 0
    assert seen[1] == (config, None)
    wrong = {"- a": "must hold options", "a: [": "cannot be read", "seqlen: 3": "--seqlen", "lr: x": "'x'"}
    for text, words in wrong.items():
        file.write_text(text)
        with contextlib.suppress(SystemExit):
            assert main(["train", "--config", str(file)]) == 2
        assert words in capsys.readouterr().err
