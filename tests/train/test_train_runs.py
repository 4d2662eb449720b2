"""Real runs, as a user starts them: two ranks, one process, torchrun, and runs that end early."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from helpers.commands import finish, killed_at_rename, ranks_of, run_cli, run_python, start_cli, wait_for
from helpers.forked import run_forked
from helpers.train_runs import assert_close, assert_same_run, log, metrics, numbers
from trimtab.checkpoint.folder import latest
from trimtab.cli.main import main
from trimtab.errors import ConfigError
from trimtab.routing.loads import load_scalars
from trimtab.train.config import TrainConfig
from trimtab.train.out_folder import make_room
from trimtab.train.packing import Blocks
from trimtab.train.plan import plan_run
from trimtab.train.presets import byte_tokenizer
from trimtab.train.resume import resumed

of_the_pair = pytest.mark.xdist_group("train_pair")  # its run is the longest of all, and each worker would make it

OPEN_WITHOUT_TRIMTAB = """
import sys
sys.modules["trimtab"] = None  # any import of it raises
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("The quick brown fox", return_tensors="pt")["input_ids"]
print(model(input_ids=ids, labels=ids).loss.item())
"""


@pytest.fixture(scope="module")
def config(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Three steps of four sequences; the last one with clipped gradients, for the norm is above 1."""
    return TrainConfig(
        model=str(checkpoint), data=(str(text),), seq_len=32, max_steps=3, lr=0.01, batch_size=4,
        out=str(tmp_path_factory.mktemp("runs") / "alone"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def options(config: TrainConfig) -> list[object]:
    """The same for the command, but for the batch."""
    more = ["--seq-len", 32, "--max-steps", 3, "--lr", 0.01]
    return ["train", "--model", config.model, "--data", *config.data, *more]


@pytest.fixture(scope="module")
def alone(config: TrainConfig) -> Path:
    """The run in one process."""
    run_forked(replace(config, eval_data=config.data, eval_every=2, report_to=("tensorboard",)), 1)
    return Path(config.out)


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
    assert_same_run(pair, alone)
    assert ["eval_loss" in record for record in metrics(alone)] == [False, True, True]  # of the last one, too
    one, two = (load_file(out / "final" / "model.safetensors") for out in (alone, pair))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        # Adam divides by the gradient's size: rounding shows where a gradient is near zero.
        assert (two[name] - weight).abs().max() < 1e-3, name
        assert torch.nn.functional.cosine_similarity(two[name].flatten(), weight.flatten(), dim=0) > 0.99999, name


@of_the_pair
def test_metrics_have_every_number(pair: Path) -> None:
    assert [record["step"] for record in metrics(pair)] == [1, 2, 3]
    for record in metrics(pair):
        assert all(math.isfinite(record[key]) for key in ("loss", "grad_norm", "lr", "tokens_per_second"))
        assert len(record["layers"]) == 2
        for layer in record["layers"].values():
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


@of_the_pair
def test_joins_torchrun_and_has_the_bits_of_the_run_that_was_killed(
    options: list[object], pair: Path, tmp_path: Path
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "trimtab"]
    result = run_python(*launcher, *options, "--batch-size", 2, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    evaluated = {"eval_loss", "eval_max_vio"}  # which is not asked for here, and changed nothing
    ours, theirs = (
        [{key: value for key, value in record.items() if key not in evaluated} for record in numbers(out)]
        for out in (tmp_path / "run", pair)
    )
    assert ours == theirs
    weights = [(out / "final" / "model.safetensors").read_bytes() for out in (tmp_path / "run", pair)]
    assert weights[0] == weights[1]


def test_copies_of_hot_experts_change_no_number_and_are_told(alone: Path, config: TrainConfig, tmp_path: Path) -> None:
    """Recomputed; and a run that goes on keeps its rule, or takes another."""
    more: dict[str, Any] = {"batch_size": 2, "save_every": 3, "gradient_checkpointing": True, "copy_cost": 0}
    out = tmp_path / "run"
    run_forked(replace(config, **more, replicate_experts="0", out=str(out)), 2)
    copied = []
    for one, two in zip(metrics(alone), metrics(out), strict=True):
        assert_close(two, {key: one[key] for key in ("loss", "grad_norm")})
        for name, layer in two["layers"].items():
            copied.append(layer.pop("replicated"))
            loads = one["layers"][name]["tokens_per_expert"]
            most = max(sum(loads[:2]), sum(loads[2:]))
            assert copied[-1]["busiest_before"] == pytest.approx(most / (sum(loads) / 2))
            assert copied[-1]["busiest_after"] == 1.0
            assert (copied[-1]["replicas"] > 0) == (copied[-1]["busiest_before"] > 1)
            assert copied[-1]["replica_bytes"] == copied[-1]["replicas"] * 4 * 32 * 16 * 3
        assert two["layers"] == one["layers"]
    assert sum(layer["replicas"] for layer in copied) > 0
    assert "ranks   the busiest had 1." in log(out)
    going_on = resumed({"resume": str(out)}), resumed({"resume": str(out), "replicate_experts": "auto"})
    assert [(each.replicate_experts, each.copy_cost) for each in going_on] == [("0", 0), ("auto", 0)]


def test_trackers_get_the_loads(alone: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = alone.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file)).Reload()
    for record in metrics(alone):
        for key, value in load_scalars(record["layers"]).items():
            (found,) = [event.value for event in events.Scalars(f"train/{key}") if event.step == record["step"]]
            assert found == pytest.approx(value, rel=1e-6), key


def test_options_of_the_trainer_reach_it(config: TrainConfig, alone: Path, tmp_path: Path) -> None:
    """Recomputed activations give the same numbers, and loads are counted once; the rate falls as it is told to."""
    more: dict[str, Any] = {"gradient_checkpointing": True, "optim": "sgd", "attn": "sdpa", "scheduler": "linear"}
    run_forked(replace(config, **more, out=str(tmp_path / "run")), 1)
    ours, theirs = metrics(tmp_path / "run"), metrics(alone)
    assert_close(ours[0], {key: theirs[0][key] for key in ("loss", "grad_norm")})
    assert ours[0]["layers"] == theirs[0]["layers"]
    assert [record["lr"] for record in ours] == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert ours[2]["loss"] != pytest.approx(theirs[2]["loss"], rel=1e-3)  # by another optimizer


def test_evaluation_is_the_mean_over_all_targets(alone: Path) -> None:
    blocks = Blocks(alone / "eval-data")
    assert len(blocks) % 4
    model = AutoModelForCausalLM.from_pretrained(alone / "final")
    losses: list[torch.Tensor] = []
    for block in map(blocks.__getitem__, range(len(blocks))):
        logits = model(input_ids=block["input_ids"][None], position_ids=block["position_ids"][None]).logits[0, :-1]
        found = torch.nn.functional.cross_entropy(logits, block["labels"][1:], reduction="none")
        losses += found[block["labels"][1:] >= 0]
    assert metrics(alone)[2]["eval_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_router_logits_of_a_family_without_a_balance_loss(config: TrainConfig, tmp_path: Path) -> None:
    """transformers gives them where the configuration asks, and DeepSeek-V3's knows no coefficient."""
    made = DeepseekV3Config(
        vocab_size=264, hidden_size=32, num_hidden_layers=1, first_k_dense_replace=0, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        eos_token_id=256, output_router_logits=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    run_forked(replace(config, model=str(tmp_path / "model"), out=str(tmp_path / "run"), max_steps=1), 1)
    assert len(metrics(tmp_path / "run")) == 1


def test_chat_in_bfloat16_without_matplotlib(config: TrainConfig, tmp_path: Path) -> None:
    chat, out = tmp_path / "chat.jsonl", tmp_path / "run"
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "Well. " * 4}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    more: dict[str, Any] = {"seq_len": 64, "max_steps": 2, "dtype": "bfloat16", "grad_accum": 2, "batch_size": 8}
    run_forked(replace(config, data=(str(chat),), out=str(out), **more), 1, "matplotlib.figure")
    assert "matplotlib is missing" in log(out)
    assert not (out / "load.png").exists()
    assert len(metrics(out)) == 2
    loads = [sum(layer["tokens_per_expert"]) for record in metrics(out) for layer in record["layers"].values()]
    tokens = int(np.sum(np.memmap(out / "data" / "0.blocks", np.int32, "r", shape=(1, 3, 64))[:, 2] >= 0))
    assert tokens < 64
    assert loads == [tokens * 8 * 2 * 2] * 4  # rows, batches and choices: what fills a block up counts nowhere


def assert_ended(process: subprocess.Popen[str], out: Path, code: int, *words: str) -> None:
    """The command's last line, its exit code, no traceback, no rank left and no model that looks finished."""
    result = finish(process)
    assert result.returncode == code, result.stderr
    assert_last_line(result.stderr, *words)
    assert "Traceback" not in result.stderr + result.stdout
    assert ranks_of(out) == []
    assert not (out / "final").exists()


def assert_last_line(said: str, *words: str) -> None:
    last = [line for line in said.replace("\r", "\n").splitlines() if line.strip()][-1]
    assert all(part in last for part in words), last


def test_ctrl_c_stops_all_ranks_and_a_hangup_under_nohup_none(options: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_cli(*options, "--max-steps", 100_000, "--nproc", 2, "--out", out, nohup=True)
    try:
        wait_for(lambda: len(ranks_of(out)) == 2, process)
        for number in (process.pid, *ranks_of(out)):  # as a terminal does that is closed
            os.kill(number, signal.SIGHUP)
        time.sleep(0.2)
        assert len(ranks_of(out)) == 2
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert_ended(process, out, 130, "interrupted by SIGINT")
    finally:
        end_all(process, out)


STARTS_A_RANK = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "trimtab.train.launch", sys.argv[1], str(os.getpid())])
time.sleep(999)
"""


def test_ranks_follow_a_killed_launcher(config: TrainConfig, tmp_path: Path) -> None:
    """This one would wait for another rank, hours long."""
    given = json.dumps(asdict(replace(config, out=str(tmp_path / "run"))))
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", STARTS_A_RANK, given, "trimtab.train.launch"]
    launcher = subprocess.Popen(command, env=os.environ | group, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(ranks_of(tmp_path / "run")) == 2, launcher)  # of itself, too
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not ranks_of(tmp_path / "run"))
    finally:
        end_all(launcher, tmp_path / "run")


def end_all(process: subprocess.Popen[str], out: Path) -> None:
    process.kill()
    for rank in ranks_of(out):
        os.kill(rank, signal.SIGKILL)
    process.communicate()


def test_a_terminated_process_says_how_far_it_came(
    options: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        wait_for(lambda: latest(tmp_path / "run" / "checkpoints") is not None)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    more = ["--max-steps", 100_000, "--save-every", 1, "--keep", 2, "--out", tmp_path / "run"]
    assert main([str(each) for each in (*options, *more)]) == 143
    assert_last_line(capfd.readouterr().err, "interrupted by SIGTERM after", "; go on from step ")
    assert not (tmp_path / "run" / "final").exists()


def test_a_dry_run_says_what_would_be_trained_and_leaves_nothing(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", checkpoint, "--data", text, "--seq-len", 16, "--epochs", 2, "--nproc", 2, "--grad-accum", 2]
    dry = [
        *map(str, options), "--batch-size", "4", "--out", str(tmp_path / "run"), "--dry-run", "--replicate-experts",
        "auto",
    ]  # fmt: skip
    assert main(["train", *dry]) == 0
    said = capsys.readouterr().out
    for words in (
        "model   Qwen3MoeForCausalLM: 37,856 parameters; what trains:",
        "2 layers: gate_up_proj [4, 32, 32], down_proj [4, 32, 16]",
        "ranks   2 = replicate 1 x fsdp 2 x tp 1; experts over 2, hot ones copied (--replicate-experts auto)",
        "of 256 tokens: 4 x 16 on each of 2 rank(s), 2 time(s)",
        "memory  of a rank: ",
        "⟦File 0. The quick brown fox",
    ):
        assert words in said
    assert list(tmp_path.iterdir()) == []
    assert main(["train", *dry, "--ep", "1"]) == 2
    assert "every rank has all experts (ep 1)" in capsys.readouterr().err


def test_epochs_count_what_is_learned_and_held_out_blocks_are_not(config: TrainConfig, tmp_path: Path) -> None:
    more: dict[str, Any] = {"seq_len": 16, "batch_size": 2, "epochs": 1.5, "eval_split": 0.25, "max_steps": None}
    config = replace(config, out=str(tmp_path / "run"), **more)
    with pytest.raises(ConfigError, match="give one of them"):
        plan_run(replace(config, max_steps=2), 2)
    plan = plan_run(config, 2)
    make_room(plan).close()
    learned, held_out, whole = plan.blocks(), plan.eval_blocks(), Blocks(tmp_path / "run" / "data")
    assert held_out is not None
    parts = [[tuple(part[i]["input_ids"].tolist()) for i in range(len(part))] for part in (learned, held_out, whole)]
    assert sorted(parts[0] + parts[1]) == sorted(parts[2])
    assert len(held_out) == round(0.25 * len(whole))
    steps = plan.with_steps().config
    assert (steps.max_steps, steps.eval_every) == (round(1.5 * len(learned) / 4), round(1.5 * len(learned) / 4) // 10)
