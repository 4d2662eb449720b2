"""What a user can get wrong ends in one line and a non-zero exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest
from transformers import LlamaConfig, TrainingArguments

from helpers.commands import run_cli, run_python
from trimtab.cli.main import build_parser, main
from trimtab.errors import ConfigError
from trimtab.processes import Interrupted, group_size, module_arguments, signals_raise
from trimtab.routing import loads
from trimtab.routing.loads import draw_loads
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.launch import launch
from trimtab.train.loop import arguments
from trimtab.train.plan import plan_run
from trimtab.train.presets import PRESETS
from trimtab.train.report import closing_words


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of unusable data and model."""
    made = tmp_path_factory.mktemp("unusable")
    for name in ("full", "bare"):
        (made / name).mkdir()
    good, question = '{"text": "as it should be"}\n' * 2000, '{"role": "user", "content": "hi"}'
    for name, content in {
        "full/thesis.txt": "precious", "empty.txt": "", "list.json": "[]",
        "late.jsonl": good + '{"text": null}\n' + good, "asked.jsonl": f'{{"messages": [{question}]}}\n' * 5,
        "chat.jsonl": f'{{"messages": [{question}, {{"role": "assistant", "content": "b"}}]}}\n',
    }.items():  # fmt: skip
        (made / name).write_text(content)
    os.mkfifo(made / "pipe")
    LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(made / "llama")
    (made / "moe").symlink_to(checkpoint)
    for path in checkpoint.iterdir():
        if path.name != "chat_template.jinja":
            (made / "bare" / path.name).symlink_to(path)
    return made


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--data", "missing.txt"], ["missing.txt", "no such file"]),
        (["--data", "empty.txt"], ["empty"]),
        (["--data", "late.jsonl"], ["late.jsonl:2001", "a `text` of the type NoneType"]),
        (["--data", "asked.jsonl"], ["the data is empty", "left out: 5 without an answer to learn"]),
        (["--data", "list.json"], ["list.json", "holds no records"]),
        (["--data", "pipe"], ["pipe", "neither a file nor a folder"]),
        (["--seed", "5000000000"], ["--seed 5000000000", "at most 4294967295"]),
        (["--model", "missing"], ["missing", "qwen3_moe"]),
        (["--model", "full"], ["config.json"]),
        (["--nproc", "4", "--fsdp", "3"], ["3 ranks, but there are 4"]),
        (["--ep", "2"], ["--ep 2", "= 1 ranks", "start 2 ranks or a multiple with --nproc"]),
        (["--max-step", "2"], ["--max-step"]),
        (["--nproc", "0"], ["--nproc 0"]),
        (["--dtype", "int8"], ["int8", "bfloat16"]),
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--max-steps", "2", "--warmup", "500"], ["--warmup 500", "not reach its peak within 2 step(s)"]),
        (["--warmup", "100"], ["--warmup 100", "within 100 step(s); lower --warmup, or raise --max-steps"]),
        (["--seq-len", "40000"], ["--seq-len 40000", "2048 positions", "max_position_embeddings"]),
        (["--save-every", "-1"], ["--save-every -1"]),
        (["--keep", "0"], ["--keep 0"]),
        (["--resume", "missing"], ["missing", "no such folder"]),
        (["--resume", "full"], ["full", "no checkpoint there"]),
        (["--out", "empty.txt/run"], ["empty.txt", "not a folder"]),
        (["--out", "full"], ["full", "in use"]),
        (["--model", "moe", "--nproc", "8", "--ep", "8"], ["--ep 8", "4 experts", "4 = 0 x 8 + 4"]),
        (["--model", "llama"], ["LlamaForCausalLM has no experts that transformers hands"]),
        (["--model", "bare", "--data", "chat.jsonl"], ["chat.jsonl:1", "need a chat template"]),
        (
            ["--model", "moe", "--nproc", "2", "--tp", "2", "--grad-accum", "2"],
            ["--tp 2 --grad-accum 2: ", " Qwen3MoeForCausalLM ", "use --grad-accum 1"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_refused_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: list[str],
    parts: list[str],
) -> None:  # fmt: skip
    """By one line on stderr and a code; in this process, and one as a user runs it."""
    monkeypatch.chdir(folder)
    if options == ["--max-step", "2"]:
        result = run_cli("train", *options)
        code, out, err = result.returncode, result.stdout, result.stderr
    else:
        code, (out, err) = ended(lambda: main(["train", *options])), capfd.readouterr()
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, len(lines)) == (2, 1), err
    assert lines[0].startswith("trimtab: ")
    assert "Traceback" not in out + err
    for part in parts:
        assert part in lines[0]
    assert not (folder / "runs").exists()


def ended(run: Callable[[], int]) -> object:
    try:
        return run()
    except SystemExit as stop:
        return stop.code


def test_what_is_like_what_is_refused_is_not(checkpoint: Path, tmp_path: Path) -> None:
    config = TrainConfig(model=str(checkpoint), out=str(tmp_path / "run"))
    assert plan_run(replace(config, tp=2), 2).mesh.tp == 2
    assert plan_run(replace(config, grad_accum=2), 2).mesh.tp == 1


def test_the_folder_of_the_model_is_not_overwritten(
    checkpoint: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "final").symlink_to(checkpoint)
    options = ["--model", tmp_path / "final", "--out", checkpoint.parent, "--data", text]
    assert main(["train", *map(str, options)]) == 2
    assert "--out" in capfd.readouterr().err
    assert (checkpoint / "config.json").exists()


def test_one_process_takes_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight that it sees, the Trainer would make an nn.DataParallel."""
    config = TrainConfig(out=str(tmp_path / "run"), max_steps=1, batch_size=1).resolved()
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: getattr(self, "_n_gpu", 8)))
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)
    made = arguments(config, Mesh.of(config, world=1, num_experts=8))
    assert made.n_gpu == 1


def test_help_names_the_presets_and_imports_little() -> None:
    result = run_cli("train", "--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in PRESETS)
    script = "import sys, trimtab.cli.main; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert run_python("-c", script).stdout.strip() == "[]"


def test_without_transformers(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["train", "--data", str(text), "--out", str(tmp_path / "run")]) == 2
    assert "trimtab train needs transformers (pip install 'trimtab[train]')" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [0, 3])
def test_an_interrupted_run_tells_its_own_steps_and_not_those_of_an_earlier_one(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n" * 5)

    def interrupted(config: TrainConfig, nproc: int | None) -> NoReturn:
        if steps:
            (tmp_path / "final").rmdir()
            (tmp_path / "metrics.jsonl").write_text("{}\n" * steps)
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("trimtab.cli.train.launch", interrupted)
    assert main(["train", "--overwrite", "--out", str(tmp_path)]) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    if steps:
        assert "interrupted by SIGTERM after 3 step(s); no model was saved; metrics are in " in said
    else:
        assert f"before its first step; what {tmp_path} holds is an earlier run's" in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"RANK": "1"}, "RANK is in the environment, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is in the environment, but not RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is in the environment, but not RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' in the environment is no integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment is none of WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "but not MASTER_PORT"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_half_of_a_launcher_s_environment(
    given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert group_size() is None
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        launch(TrainConfig(out=str(tmp_path / "run")), None)
    options = build_parser().parse_args(["verify", "--quick"])
    with pytest.raises(ConfigError, match=words):
        options.run(options)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert group_size() == 1


def test_ranks_find_modules_where_their_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert module_arguments("a.b") == ["-P", "-m", "a.b"]
    for here in ("", os.getcwd()):
        monkeypatch.setattr(sys, "path", [here, "/elsewhere"])
        assert module_arguments("a.b") == ["-m", "a.b"]


def test_a_picture_that_cannot_be_drawn_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a run without a step of its own, as one that is resumed at its end to write the model."""
    (tmp_path / "metrics.jsonl").touch()
    assert str(draw_loads(tmp_path / "metrics.jsonl", tmp_path / "load.png")).startswith("not drawn: ")
    words = closing_words(tmp_path, "byte", 1, "not drawn")
    assert [line.split()[0] for line in words] == ["metrics", "loads", "model"]
    monkeypatch.setattr(loads, "_draw", Mock(side_effect=RuntimeError("first\nsecond")))
    assert draw_loads(tmp_path / "metrics.jsonl", tmp_path / "load.png") == "not drawn: RuntimeError: first"


def cut_off_by(number: signal.Signals) -> None:
    """As torch.save, whose file ends in an error where it was cut off."""
    with signals_raise():
        try:
            os.kill(os.getpid(), number)
        finally:
            raise RuntimeError("unexpected pos 582 vs 466")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_failure_that_follows_from_a_signal_is_the_signal(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as raised:
        cut_off_by(number)
    assert raised.value.number == number
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert signal.getsignal(number) is before


def test_a_failure_without_a_signal_is_that_failure() -> None:
    with pytest.raises(RuntimeError, match="on its own"), signals_raise():
        raise RuntimeError("on its own")
