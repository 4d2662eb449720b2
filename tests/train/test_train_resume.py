"""A run that goes on is the run that never stopped: every number and every bit."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoTokenizer

from helpers.forked import run_forked
from helpers.train_runs import assert_close, assert_same_bits, numbers
from trimtab.checkpoint import read_tensors
from trimtab.checkpoint.folder import begin, clear, whole_checkpoints
from trimtab.convert.convert import convert
from trimtab.errors import ConfigError, InputError
from trimtab.train.config import TrainConfig
from trimtab.train.out_folder import check_disk, make_room, write_init
from trimtab.train.plan import plan_run
from trimtab.train.report import best_step
from trimtab.train.resume import advice, check_resume, describe_data, read_metrics_until, remove_old, resumed, rewind
from trimtab.train.sources import Group, find_groups


def check(config: TrainConfig, world: int) -> None:
    check_resume(config, world, find_groups(config.data))


@pytest.fixture(scope="module")
def config(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Four steps of two batches on each of two ranks, of packed conversations in a table and of text, by weight;
    attention drops out, so that random numbers are drawn."""
    model = tmp_path_factory.mktemp("dropout") / "model"
    shutil.copytree(checkpoint, model)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "attention_dropout": 0.3}))
    chats = model.with_name("chats.parquet")
    turns = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "word " * n}] for n in range(1, 9)]
    parquet.write_table(pa.table({"messages": turns}), chats)
    return TrainConfig(
        model=str(model), data=(f"{text}=0.4", f"{chats}=0.6"), seq_len=64, batch_size=1, grad_accum=2, max_steps=4,
        lr=0.01, out=str(tmp_path_factory.mktemp("runs") / "whole"), save_every=2, eval_split=0.1, eval_every=1,
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
    assert_same_bits(out, whole, 4)
    held = read_tensors(out / "checkpoints" / "step-00000004")
    assert sum(key.startswith("optim.") for key in held) == 3 * sum(key.startswith("model.") for key in held)


def test_muon_goes_on_with_its_momentum(config: TrainConfig, tmp_path: Path) -> None:
    made = replace(config, optim="muon", out=str(tmp_path / "whole"))
    run_forked(made, 2)
    run_forked(replace(made, out=str(tmp_path / "parts"), save_every=None, stop_after=2), 2)
    run_forked(resumed({"resume": str(tmp_path / "parts"), "save_every": 2}), 2)
    assert_same_bits(tmp_path / "parts", tmp_path / "whole", 4)
    held = read_tensors(tmp_path / "parts" / "checkpoints" / "step-00000004")
    experts = [key for key in held if key.endswith(".momentum_buffer") and ".experts." in key]
    assert experts
    assert any(key.endswith(".exp_avg_sq") for key in held)


def test_ranks_may_share_the_experts_otherwise(config: TrainConfig, whole: Path) -> None:
    given = {"resume": str(whole / "checkpoints" / "step-00000002"), "out": str(whole.with_name("other")), "ep": 1}
    run_forked(resumed(given | {"save_every": 2, "keep": 1}), 2)
    ours, theirs = numbers(Path(given["out"])), numbers(whole)
    assert ours[:2] == theirs[:2]
    assert [line["step"] for line in ours] == [1, 2, 3, 4]
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, {key: value for key, value in other.items() if key not in ("lr", "eval_max_vio")}, norm=1e-4)
        assert mine["layers"] == other["layers"]


def test_the_best_checkpoint_is_kept_with_the_latest(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5}
    for step, loss in losses.items():
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "trimtab.json").touch()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "eval_loss": loss}) + "\n")
    remove_old(tmp_path, 1)
    held = whole_checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in held] == ["step-00000002", "step-00000004"]
    assert best_step(tmp_path / "metrics.jsonl", held) == 2


@pytest.fixture
def half(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run, as it was after two steps."""
    shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000004")
    return tmp_path / "half"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"seq_len": 32}, ["--seq-len 32", "64"]), ({"batch_size": 2}, ["--batch-size 2", "has 1"]),
        ({"grad_accum": 1}, ["--grad-accum 1", "has 2"]),
        ({"max_steps": 8}, ["--max-steps 8", "has 4", "--stop-after"]), ({"lr": 0.1}, ["--lr 0.1", "0.01"]),
        ({"warmup": 3}, ["--warmup 3", "has 0"]), ({"seed": 1}, ["--seed 1", "has 0"]),
        ({"dtype": "bfloat16"}, ["--dtype bfloat16", "float32"]), ({"model": "olmoe"}, ["--model olmoe", "dropout"]),
        ({"data": (__file__,)}, ["--data", "1 file(s)", "7 of", "--accept-new-data"]),
        ({"nproc": 1}, ["2 rank(s)", "1 would now", "--nproc"]), ({"stop_after": 2}, ["step 2 is taken"]),
    ],
    ids=lambda value: "-".join(value),
)  # fmt: skip
def test_what_must_not_change_is_refused(half: Path, given: dict[str, Any], parts: list[str]) -> None:
    world = given.get("nproc", 2)
    with pytest.raises(ConfigError) as error:
        check(resumed({"resume": str(half)} | {k: v for k, v in given.items() if k != "nproc"}), world)
    for part in parts:
        assert part in str(error.value)


def test_what_may_change(half: Path, text: Path) -> None:
    moved = half / "moved"
    shutil.copytree(text, moved)
    data = (f"{moved}=0.4", resumed({"resume": str(half)}).data[1])
    config = resumed({"resume": str(half / "checkpoints"), "data": data, "ep": 1, "stop_after": 3, "lr": 0.01})
    check(config, 2)
    assert (config.out, config.ep, config.stop_after, config.save_every) == (str(half), 1, 3, 2)
    (moved / "0.txt").write_text("A line that is put right.")
    with pytest.raises(ConfigError, match="--accept-new-data"):
        check(config, 2)
    check(replace(config, accept_new_data=True), 2)
    with pytest.raises(ConfigError, match="say with --out"):
        resumed({"resume": str((half / "checkpoints" / "step-00000002").rename(half / "step-00000002"))})


def test_options_that_are_none_here_are_refused_by_name(half: Path) -> None:
    path = half / "checkpoints" / "step-00000002" / "trimtab.json"
    index = json.loads(path.read_text())
    index["extra"]["run"]["config"] |= {"momentum": 0.9, "heads": 2}
    path.write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match="options that this trimtab lacks: heads, momentum; go on with the trimtab that"
    ):
        resumed({"resume": str(half)})


def test_the_model_may_lie_elsewhere(config: TrainConfig, half: Path) -> None:
    moved = shutil.copytree(config.model, half / "elsewhere")
    assert resumed({"resume": str(half), "model": str(moved)}).model == str(moved)
    (moved / "added_tokens.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot change it: added_tokens"):
        resumed({"resume": str(half), "model": str(moved)})
    (moved / "added_tokens.json").unlink()
    for name in ("tokenizer.json", "config.json"):
        (moved / name).write_text((moved / name).read_text() + " ")
        with pytest.raises(ConfigError, match=f"cannot change it: {name} is not what the checkpoint holds"):
            resumed({"resume": str(half), "model": str(moved)})
        (moved / name).unlink()
        with pytest.raises(ConfigError, match=f"cannot change it: {name} is not"):
            resumed({"resume": str(half), "model": str(moved)})


def test_a_model_that_was_not_written_is_written_in_the_end(whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    assert advice(out, 2) is None
    (out / "final").rename(out / "final.unfinished")  # as a kill leaves it
    (out / "final.unfinished" / "model.safetensors").write_bytes(b"half")
    (out / "final.unfinished" / "more").touch()
    (out / "load.png").unlink()
    assert advice(out, 2) == f"go on from step 4 with: trimtab train --resume {out} --nproc 2"
    run_forked(resumed({"resume": str(out)}), 2)
    assert numbers(out) == numbers(whole)
    assert (out / "load.png").exists()
    assert not (out / "final.unfinished").exists()
    assert sorted(p.name for p in (out / "final").iterdir()) == sorted(p.name for p in (whole / "final").iterdir())
    assert (out / "load.png").stat().st_mtime_ns < (out / "final").stat().st_ctime_ns  # the model ends a run
    for path in (out / "final").iterdir():
        assert path.read_bytes() == (whole / "final" / path.name).read_bytes(), path.name


def test_a_checkpoint_alone_becomes_a_folder_of_transformers(whole: Path, tmp_path: Path) -> None:
    done = convert(whole / "checkpoints", tmp_path / "hf", to="safetensors")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} < set(done.files)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", whole / "final"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    text = "A chat's tokens: ä."
    one, other = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "hf", whole / "final"))
    assert one(text)["input_ids"] == other(text)["input_ids"]
    assert one.chat_template == other.chat_template is not None


def assert_in_the_way(words: str, *configs: TrainConfig) -> None:
    for config in configs:
        with pytest.raises(ConfigError, match=rf"holds {words}") as refused:
            plan_run(config, 2)
        assert "--overwrite" in str(refused.value)


def test_what_is_in_the_way_goes_only_where_that_is_asked_for(config: TrainConfig, whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    new = replace(config, out=str(out))
    early = resumed({"resume": str(out / "checkpoints" / "step-00000002")})
    assert_in_the_way("checkpoints of a finished run, up to step-00000004; give", new)
    assert_in_the_way("later checkpoints of a finished run, up to step-00000004; give a new", early)
    (out / "final").rename(out / "elsewhere")
    assert_in_the_way(rf"checkpoints of a run, .*; go on from there by --resume {out}, .*new", new)
    assert_in_the_way(rf"later checkpoints of a run, .*; go on from there by --resume {out}, give", early)
    (out / "elsewhere").rename(out / "final")
    for asked in (new, early):
        plan_run(replace(asked, overwrite=True), 2)
    plan_run(replace(early, out=str(tmp_path / "other")), 2)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    another = replace(early, out=str(shutil.copytree(out, tmp_path / "copy")))
    assert_in_the_way("checkpoints of a finished run, up to step-00000002", another)
    assert_in_the_way("the model of a finished run, .*final; ", resumed({"resume": str(out)}))
    shutil.rmtree(out / "checkpoints")
    assert_in_the_way("the model of a finished run, .*final; ", new)

    make_room(plan_run(replace(new, overwrite=True), 2)).close()
    assert sorted(path.name for path in out.iterdir()) == ["data", "logs", "run.json"]


def test_what_came_after_the_checkpoint_goes(whole: Path, tmp_path: Path) -> None:
    out, other = (shutil.copytree(whole, tmp_path / name) for name in ("run", "other"))
    first = out / "checkpoints" / "step-00000002"
    rewind(first, 2, out)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    rewind(first, 2, other)
    assert list((other / "checkpoints").iterdir()) == []
    for folder in (out, other):
        assert len(numbers(folder)) == 2
        assert not (folder / "final").exists()


def test_what_a_resumed_run_removes_is_room(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    given = {"resume": str(out / "checkpoints" / "step-00000002"), "out": str(out), "overwrite": True}
    often = plan_run(resumed({**given, "save_every": 1, "keep": 2}), 2).with_steps()
    assert " and 2 checkpoint(s), " in check_disk(often)  # step 4 of before is none that is held
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 17))
    once = plan_run(resumed({**given, "save_every": 2}), 2).with_steps()
    assert " and 1 checkpoint(s), " in check_disk(once)
    with pytest.raises(ConfigError, match=r"2 checkpoint\(s\), [\d.]+ MB are free; make room"):
        check_disk(often)
    half = shutil.copytree(out / "checkpoints" / "step-00000002", out / "checkpoints" / "step-00000003.unfinished")
    (half / "trimtab.json").unlink()
    check_disk(often)


def test_first_weights_are_those_of_this_run(config: TrainConfig, tmp_path: Path) -> None:
    def write(model: str, seed: int) -> tuple[bytes, int]:
        plan = plan_run(replace(config, model=model, seed=seed, out=str(tmp_path / "run")), 2)
        write_init(plan)
        (plan.out / "run.json").touch()
        weights = tmp_path / "run" / "init" / "model.safetensors"
        return weights.read_bytes(), weights.stat().st_mtime_ns

    first = write("qwen3_moe", 0)
    assert write("qwen3_moe", 0) == first  # read, not written again
    for model, seed in (("olmoe", 0), ("olmoe", 1), ("qwen3_moe", 0)):
        before, first = first, write(model, seed)
        assert before[0] != first[0]
    (tmp_path / "run" / "init" / "init.json").unlink()  # a kill before the end of the folder
    (tmp_path / "run" / "init" / "model.safetensors").write_bytes(b"half")
    assert write("qwen3_moe", 0)[0] == first[0]


def test_an_unfinished_checkpoint_is_in_nobody_s_way(config: TrainConfig, half: Path) -> None:
    clear(half / "final")
    folder = half / "checkpoints" / "step-00000002"
    folder.rename(folder.with_name("step-00000002.unfinished"))
    plan_run(replace(config, out=str(half)), 2)
    with pytest.raises(InputError, match=r"step-00000002.unfinished was not written to the end"):
        resumed({"resume": str(half)})


def test_half_a_copy_is_in_the_way_of_what_would_take_its_name(config: TrainConfig, half: Path) -> None:
    clear(half / "final")
    later = shutil.copytree(half / "checkpoints" / "step-00000002", half / "checkpoints" / "step-00000004")
    (later / "trimtab.json").unlink()
    resume = resumed({"resume": str(half)})
    assert_in_the_way("step-00000004, which is not whole, ", resume)
    plan_run(replace(resume, overwrite=True), 2)
    with pytest.raises(ConfigError, match=r"there is half a checkpoint .* of step 4 already"):
        begin(half / "checkpoints", 4)
    rewind(half / "checkpoints" / "step-00000002", 2, half)
    assert [path.name for path in (half / "checkpoints").iterdir()] == ["step-00000002"]
    later = half / "checkpoints" / "step-00000002"
    (later / "trimtab.json").unlink()
    new = replace(config, out=str(half))
    assert_in_the_way("step-00000002, which is not whole", new)
    make_room(plan_run(replace(new, overwrite=True), 2)).close()
    assert not (half / "checkpoints").exists()


def test_checkpoints_may_be_links_to_where_there_is_room(config: TrainConfig, half: Path, tmp_path: Path) -> None:
    """The folder, a checkpoint in it and the model: each is found by its name in the run, and goes as a link does."""
    shutil.move(half / "checkpoints", tmp_path / "disk")
    (half / "checkpoints").symlink_to(tmp_path / "disk")
    found = resumed({"resume": str(half)})
    assert (found.out, found.resume) == (str(half), str(half / "checkpoints" / "step-00000002"))
    assert len(read_metrics_until(Path(found.resume or ""), 2)) == 2
    elsewhere = tmp_path / "latest"
    elsewhere.symlink_to(half / "checkpoints" / "step-00000002")
    with pytest.raises(ConfigError, match="say with --out"):  # the link's own name says nothing of a run
        resumed({"resume": str(elsewhere)})
    assert resumed({"resume": str(elsewhere), "out": "x"}).resume == str(tmp_path / "disk" / "step-00000002")
    one = half / "checkpoints" / "step-00000002"
    shutil.move(tmp_path / "disk" / "step-00000002", tmp_path / "other-disk")
    one.symlink_to(tmp_path / "other-disk")
    shutil.copytree(half / "final", tmp_path / "kept")
    clear(half / "final")
    found = resumed({"resume": str(half)})
    plan_run(found, 2)
    rewind(Path(found.resume or ""), 2, half)
    assert one.is_symlink()
    assert (one / "trimtab.json").exists()
    one.unlink()
    shutil.move(tmp_path / "other-disk", one)
    shutil.move(tmp_path / "kept", half / "final")
    shutil.move(half / "final", tmp_path / "model")
    (half / "final").symlink_to(tmp_path / "model")
    assert_in_the_way("the model of a finished run", found)
    rewind(Path(found.resume or ""), 2, half)
    assert not (half / "final").is_symlink()
    (half / "final").symlink_to(tmp_path / "model")
    make_room(plan_run(replace(config, out=str(half), overwrite=True), 2)).close()
    assert not (half / "final").is_symlink()
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "model" / "config.json").exists()


def test_a_folder_that_a_run_writes_to_is_closed_to_others(config: TrainConfig, tmp_path: Path) -> None:
    one = plan_run(replace(config, out=str(tmp_path / "run")), 2)
    with contextlib.closing(make_room(one)):
        (one.out / "metrics.jsonl").write_text("{}\n")
        for other in (one, plan_run(replace(one.config, overwrite=True), 2)):
            with pytest.raises(ConfigError, match="another run is writing there"):
                make_room(other)
        assert (one.out / "metrics.jsonl").exists()
        assert json.loads((one.out / "run.json").read_text())["out"] == str(one.out)
        (one.out / "final").mkdir()
    with pytest.raises(ConfigError, match="model of a finished run") as kept:  # it ended meanwhile
        make_room(one)
    assert (one.out / "final").exists()
    shutil.rmtree(one.out / "final")
    make_room(one).close()  # also while somebody holds the error
    del kept


def test_metrics_that_are_damaged_are_not_taken_for_none(half: Path) -> None:
    folder, metrics = half / "checkpoints" / "step-00000002", half / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    for place, wrong in ((1, lines[0][1:]), (2, "{}\n"), (2, '{"step": "2"}\n'), (1, "\udcff\n"), (1, lines[0][:9])):
        text = "".join([*lines[: place - 1], wrong, *lines[place:]])
        metrics.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(InputError, match=rf"ends with step {place - 1} or is damaged there; .* is of step 2"):
            read_metrics_until(folder, 2)
    metrics.write_text("".join(lines[:2]) + lines[2][:9])
    assert read_metrics_until(folder, 2) == lines[:2]
    metrics.unlink()
    assert read_metrics_until(folder, 2) == []


def test_data_may_have_names_of_any_bytes(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9.txt")
    file.write_text("text")
    one = describe_data([Group([file])])["names"]
    assert one != describe_data([Group([file.rename(tmp_path / "cafe.txt")])])["names"]


def test_advice_can_be_pasted(half: Path) -> None:
    clear(half / "final")
    moved = half.rename(half.with_name("my run"))
    assert shlex.split(advice(moved, 1) or "")[-1] == str(moved)
