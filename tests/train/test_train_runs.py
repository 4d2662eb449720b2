"""Real runs, as a user starts them: two ranks, one process, torchrun, and runs that end early."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import finish, killed_at_rename, ranks_of, run_cli, run_python, start_cli, wait_for
from helpers.forked import run_forked
from trimtab.checkpoint.folder import latest
from trimtab.cli.main import main
from trimtab.errors import ConfigError
from trimtab.routing.loads import load_scalars
from trimtab.train.config import TrainConfig
from trimtab.train.dataset import Blocks
from trimtab.train.out_folder import make_room
from trimtab.train.plan import plan_run
from trimtab.train.resume import resumed

of_the_pair = pytest.mark.xdist_group("train_pair")  # its run is the longest of all, and each worker would make it

OPEN_WITHOUT_TRIMTAB = """
import sys
sys.modules["trimtab"] = None  # any import of it raises
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
loss = model(**tokenizer("The quick brown fox", return_tensors="pt"), labels=tokenizer(
    "The quick brown fox", return_tensors="pt")["input_ids"]).loss
print(loss.item())
"""


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def options(checkpoint: Path, text: Path) -> list[object]:
    """Three steps of four sequences; the last one with clipped gradients, for the norm is above 1."""
    return ["train", "--model", checkpoint, "--data", text, "--seq-len", 32, "--max-steps", 3, "--lr", 0.01]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    values: dict[str, Any] = {"seq_len": 32, "max_steps": 3, "lr": 0.01, "batch_size": 4, "eval_every": 2}
    given = TrainConfig(model=str(checkpoint), data=(str(text),), eval_data=(str(text),), out=str(out), **values)
    run_forked(replace(given, report_to=("tensorboard",)), 1)
    return out


@pytest.fixture(scope="module")
def pair(options: list[object], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same global batch on two ranks that share the experts, killed while it saves step 2, and gone on with."""
    folder = tmp_path_factory.mktemp("pair")
    out, start = folder / "run", killed_at_rename(folder / "start", "step-00000002", rank=0)
    more = ["--eval-data", text, "--eval-every", 2, "--save-every", 1, "--nproc", 2, "--batch-size", 2]
    process = start_cli(*options, *more, "--out", out, start=start)
    advice = f"go on from step 1 with: trimtab train --resume {out} --nproc 2"
    assert_ended(process, out, 1, "rank 0 was ended by SIGKILL", advice)
    assert [record["step"] for record in metrics(out)] == [1, 2]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000001", "step-00000002.unfinished"]
    result = run_cli("train", "--resume", out, "--nproc", 2)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr  # FSDP warns of outputs that are views
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]
    for part in ("metrics.jsonl", "load.png", "final", "nats per token in 3 steps"):
        assert part in result.stdout
    return out


@of_the_pair
def test_two_ranks_have_the_numbers_of_one_process(alone: Path, pair: Path) -> None:
    for one, two in zip(metrics(alone), metrics(pair), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert two["lr"] == one["lr"]
        assert two["layers"] == one["layers"]
    for step in (1, 2):  # of the last one, too
        assert metrics(pair)[step]["eval_loss"] == pytest.approx(metrics(alone)[step]["eval_loss"], rel=1e-5)
        assert metrics(pair)[step]["eval_max_vio"] == metrics(alone)[step]["eval_max_vio"]


@of_the_pair
def test_copies_of_hot_experts_change_no_number_and_are_told(
    alone: Path, options: list[object], tmp_path: Path
) -> None:
    """Recomputed; and a run that goes on keeps its rule, or takes another."""
    out, more = tmp_path / "run", ["--nproc", 2, "--batch-size", 2, "--save-every", 3, "--gradient-checkpointing"]
    result = run_cli(*options, *more, "--balance", 0, "--copy-cost", 0, "--out", out)
    assert result.returncode == 0, result.stderr
    copied = []
    for one, two in zip(metrics(alone), metrics(out), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        for name, layer in two["layers"].items():
            copied.append(layer.pop("balanced"))
            loads = one["layers"][name]["tokens_per_expert"]
            most = max(sum(loads[:2]), sum(loads[2:]))
            assert copied[-1]["busiest_before"] == pytest.approx(most / (sum(loads) / 2))
            assert copied[-1]["busiest_after"] == 1.0
            assert (copied[-1]["copies"] > 0) == (copied[-1]["busiest_before"] > 1)
            assert copied[-1]["copy_bytes"] == copied[-1]["copies"] * 4 * 32 * 16 * 3
        assert two["layers"] == one["layers"]
    assert sum(layer["copies"] for layer in copied) > 0
    assert "ranks   the busiest had 1." in result.stdout
    going_on = resumed({"resume": str(out)}), resumed({"resume": str(out), "balance": "auto"})
    assert [(config.balance, config.copy_cost) for config in going_on] == [("0", 0), ("auto", 0)]


def test_trackers_get_the_loads(alone: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = alone.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file)).Reload()
    for record in metrics(alone):
        for key, value in load_scalars(record["layers"]).items():
            (found,) = [event.value for event in events.Scalars(f"train/{key}") if event.step == record["step"]]
            assert found == pytest.approx(value, rel=1e-6), key


def test_options_of_the_trainer_reach_it(checkpoint: Path, text: Path, alone: Path, tmp_path: Path) -> None:
    """Recomputed activations give the same numbers, and loads are counted once; the rate falls as it is told to."""
    values: dict[str, Any] = {"seq_len": 32, "max_steps": 3, "lr": 0.01, "batch_size": 4, "scheduler": "linear"}
    more: dict[str, Any] = {
        "gradient_checkpointing": True,
        "optim": "sgd",
        "attn": "sdpa",
        "out": str(tmp_path / "run"),
    }
    run_forked(TrainConfig(model=str(checkpoint), data=(str(text),), **values, **more), 1)
    ours, theirs = metrics(tmp_path / "run"), metrics(alone)
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-6)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-5)
    assert ours[0]["layers"] == theirs[0]["layers"]
    assert [record["lr"] for record in ours] == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert ours[2]["loss"] != pytest.approx(theirs[2]["loss"], rel=1e-3)  # by another optimizer


def test_evaluation_is_the_mean_over_all_targets(alone: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert ["eval_loss" in record for record in metrics(alone)] == [False, True, True]
    blocks = Blocks(alone / "eval-data")
    assert len(blocks) % 4
    model = AutoModelForCausalLM.from_pretrained(alone / "final")
    losses: list[torch.Tensor] = []
    for block in map(blocks.__getitem__, range(len(blocks))):
        logits = model(input_ids=block["input_ids"][None], position_ids=block["position_ids"][None]).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, block["labels"][1:], reduction="none")[
            block["labels"][1:] >= 0
        ]
    assert metrics(alone)[2]["eval_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@of_the_pair
def test_two_ranks_save_the_weights_of_one_process(alone: Path, pair: Path) -> None:
    import torch
    from safetensors.torch import load_file

    one, two = (load_file(out / "final" / "model.safetensors") for out in (alone, pair))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        # Adam divides by the gradient's size: rounding shows where a gradient is near zero.
        assert (two[name] - weight).abs().max() < 1e-3, name
        assert torch.nn.functional.cosine_similarity(two[name].flatten(), weight.flatten(), dim=0) > 0.99999, name


@of_the_pair
def test_metrics_have_every_number(pair: Path) -> None:
    records = metrics(pair)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert all(math.isfinite(record[key]) for key in ("loss", "grad_norm", "lr", "tokens_per_second"))  # type: ignore
        layers = record["layers"]
        assert len(layers) == 2  # type: ignore[arg-type]
        for layer in layers.values():  # type: ignore[attr-defined]
            loads = layer["tokens_per_expert"]
            assert sum(loads) == 4 * 32 * 2  # sequences x tokens x choices, of both ranks
            assert layer["max_vio"] == pytest.approx(max(loads) / (sum(loads) / 4) - 1)
            assert layer["dead_experts"] == loads.count(0)


@of_the_pair
def test_picture_and_model_stand_alone(pair: Path) -> None:
    assert (pair / "load.png").read_bytes()[:4] == b"\x89PNG"
    for path in (pair / "final").iterdir():
        if path.suffix != ".safetensors":
            assert "trimtab" not in path.read_text()
            assert "distributed_config" not in path.read_text()
    result = run_python("-c", OPEN_WITHOUT_TRIMTAB, pair / "final")
    assert result.returncode == 0, result.stderr
    assert 0 < float(result.stdout) < 10


def test_router_logits_of_a_family_without_a_balance_loss(text: Path, tmp_path: Path) -> None:
    """transformers gives them where the configuration asks, and DeepSeek-V3's knows no coefficient."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    from trimtab.train.presets import byte_tokenizer

    config = DeepseekV3Config(
        vocab_size=264, hidden_size=32, num_hidden_layers=1, first_k_dense_replace=0, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        eos_token_id=256, output_router_logits=True,
    )  # fmt: skip
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    values: dict[str, Any] = {"seq_len": 32, "max_steps": 1, "batch_size": 2}
    run_forked(TrainConfig(model=str(model), data=(str(text),), out=str(tmp_path / "run"), **values), 1)
    assert len(metrics(tmp_path / "run")) == 1


def test_chat_in_bfloat16_without_matplotlib(checkpoint: Path, tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "Well. " * 4}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    out = tmp_path / "run"
    values: dict[str, Any] = {"seq_len": 64, "max_steps": 2, "dtype": "bfloat16", "grad_accum": 2}
    run_forked(TrainConfig(model=str(checkpoint), data=(str(chat),), out=str(out), **values), 1, "matplotlib.figure")
    assert "matplotlib is missing" in out.with_name("run-log").read_text()
    assert not (out / "load.png").exists()
    assert len(metrics(out)) == 2
    loads = [sum(layer["tokens_per_expert"]) for record in metrics(out) for layer in record["layers"].values()]  # type: ignore[attr-defined]
    tokens = int(np.sum(np.memmap(out / "data" / "0.blocks", np.int32, "r", shape=(1, 3, 64))[:, 2] >= 0))
    assert tokens < 64
    assert loads == [tokens * 8 * 2 * 2] * 4  # rows, batches and choices: what fills a block up counts nowhere


@of_the_pair
def test_joins_torchrun_and_has_the_bits_of_the_run_that_was_killed(
    options: list[object], pair: Path, tmp_path: Path
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "trimtab"]
    result = run_python(*launcher, *options, "--batch-size", 2, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    ours, theirs = (
        [{key: record[key] for key in ("step", "loss", "grad_norm", "lr", "layers")} for record in metrics(out)]
        for out in (tmp_path / "run", pair)
    )
    assert ours == theirs  # and evaluation, which is not asked for here, changed nothing
    weights = [(out / "final" / "model.safetensors").read_bytes() for out in (tmp_path / "run", pair)]
    assert weights[0] == weights[1]


def assert_ended(process: subprocess.Popen[str], out: Path, code: int, *words: str) -> None:
    """The command's last line, its exit code, no traceback, no rank left and no model that looks finished."""
    result = finish(process)
    assert result.returncode == code, result.stderr
    last = [line for line in result.stderr.replace("\r", "\n").splitlines() if line.strip()][-1]
    assert all(part in last for part in words)
    assert "Traceback" not in result.stderr + result.stdout
    assert ranks_of(out) == []
    assert not (out / "final").exists()


def two_ranks_started(out: Path) -> Callable[[], bool]:
    return lambda: len(ranks_of(out)) == 2


@pytest.fixture
def endless(options: list[object], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts runs that only end when they are made to."""
    started: list[subprocess.Popen[str]] = []

    def start(*more: object, nohup: bool = False) -> subprocess.Popen[str]:
        started.append(start_cli(*options, "--max-steps", 100_000, "--out", tmp_path / "run", *more, nohup=nohup))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    for rank in ranks_of(tmp_path / "run"):
        os.kill(rank, signal.SIGKILL)
    for process in started:
        process.communicate()


def test_ctrl_c_stops_all_ranks_and_a_hangup_under_nohup_none(
    endless: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = endless("--nproc", 2, nohup=True)
    wait_for(two_ranks_started(tmp_path / "run"), process)
    for number in (process.pid, *ranks_of(tmp_path / "run")):  # as a terminal does that is closed
        os.kill(number, signal.SIGHUP)
    time.sleep(0.2)
    assert len(ranks_of(tmp_path / "run")) == 2
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert_ended(process, tmp_path / "run", 130, "interrupted by SIGINT")


def test_a_terminated_process_says_how_far_it_came(
    endless: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = endless("--save-every", 1)
    wait_for(lambda: latest(tmp_path / "run" / "checkpoints") is not None, process)
    process.terminate()
    assert_ended(process, tmp_path / "run", 143, "interrupted by SIGTERM after", "; go on from step ")


def test_ranks_follow_a_killed_launcher(endless: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = endless("--nproc", 2)
    wait_for(two_ranks_started(tmp_path / "run"), process)
    process.kill()
    wait_for(lambda: not ranks_of(tmp_path / "run"))


def test_a_dry_run_says_what_would_be_trained_and_leaves_nothing(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", checkpoint, "--data", text, "--seq-len", 16, "--epochs", 2, "--nproc", 2, "--grad-accum", 2]
    dry = [*map(str, options), "--batch-size", "4", "--out", str(tmp_path / "run"), "--dry-run", "--balance", "auto"]
    assert main(["train", *dry]) == 0
    said = capsys.readouterr().out
    assert "model   Qwen3MoeForCausalLM: 37,856 parameters; what trains:" in said
    assert "2 layers: gate_up_proj [4, 32, 32], down_proj [4, 32, 16]" in said
    assert "ranks   2 = replicate 1 x fsdp 2 x tp 1; experts over 2, hot ones copied (--balance auto)" in said
    assert "of 256 tokens: 4 x 16 on each of 2 rank(s), 2 time(s)" in said
    assert "memory  of a rank: " in said
    assert "⟦File 0. The quick brown fox" in said
    assert list(tmp_path.iterdir()) == []
    assert main(["train", *dry, "--ep", "1"]) == 2
    assert "every rank has all experts (ep 1)" in capsys.readouterr().err


def test_epochs_count_what_is_learnt_and_held_out_blocks_are_not(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"seq_len": 16, "batch_size": 2, "epochs": 1.5, "eval_split": 0.25}
    config = TrainConfig(model=str(checkpoint), data=(str(text),), out=str(tmp_path / "run"), **values)
    with pytest.raises(ConfigError, match="give one of them"):
        plan_run(replace(config, max_steps=2), 2)
    plan = plan_run(config, 2)
    make_room(plan).close()
    learnt, held_out = plan.blocks(), plan.eval_blocks()
    assert held_out is not None
    whole = Blocks(tmp_path / "run" / "data")
    parts = [[tuple(part[i]["input_ids"].tolist()) for i in range(len(part))] for part in (learnt, held_out, whole)]
    assert sorted(parts[0] + parts[1]) == sorted(parts[2])
    assert len(held_out) == round(0.25 * len(whole))
    steps = plan.with_steps().config
    assert (steps.max_steps, steps.eval_every) == (round(1.5 * len(learnt) / 4), round(1.5 * len(learnt) / 4) // 10)
