"""examples/grpo_replay.py as a user runs it: with replay the trainer's log-probabilities are those of the rollout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.grpo_replay import read, table
from helpers.commands import torchrun
from trimtab.train.presets import byte_tokenizer

LAYERS = 4


def write_near_ties(folder: Path) -> None:
    """A Qwen3-MoE whose router likes all experts nearly alike, and whose experts differ much."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=True,
        initializer_range=0.1, bos_token_id=None, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(0.1)
            layer.mlp.experts.down_proj.mul_(4.0)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def run(folder: Path, ranks: int, steps: int) -> list[dict[str, Any]]:
    """What the example logs of its steps."""
    out = folder / f"on-{ranks}"
    torchrun("examples/grpo_replay.py", folder / "model", out, "--steps", steps, ranks=ranks)
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in log if "loss" in entry]


@pytest.mark.xdist_group("ranks2")
def test_replay_takes_the_distance_between_rollout_and_trainer(tmp_path: Path) -> None:
    """Two rollouts, the second from weights that the ranks have trained, each with completions of several lengths."""
    write_near_ties(tmp_path / "model")
    steps = run(tmp_path, ranks=2, steps=3)
    assert len(steps) == 3
    assert all(math.isfinite(step["loss"]) and 0 < step["grad_norm"] < math.inf for step in steps)
    rollouts = [step for step in steps if "rollout/kl" in step]
    assert [step["step"] for step in rollouts] == [1, 3]
    assert any(step["completions/min_length"] < 48 for step in rollouts), "nothing was padded on the right"
    for step in rollouts:
        assert step["rollout/other_experts"] > 0.01, "bfloat16 picked what float32 picks: nothing to replay"
        assert step["rollout/live/logp_diff"] > 4 * step["rollout/logp_diff"] > 0
        assert step["rollout/live/kl"] > 30 * step["rollout/kl"]
        assert step["rollout/live/clipped"] > 0.05 > 50 * step["rollout/clipped"]
        assert step["clip_ratio/region_mean"] == 0, "the loss has other experts than the old log-probabilities"
    logged = read(tmp_path / "on-2")
    assert logged["kl"] == [step["rollout/kl"] for step in rollouts]
    assert f"| {sum(logged['logp_diff']) / 2:.4f} |" in table({(0, True): logged}).splitlines()[-1]
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "on-2"))
    assert before.keys() == after.keys()
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    assert all(bool((before[name] != after[name]).any(-1).all()) for name in routers), "every expert's row"
    assert not [name for name in before if torch.equal(before[name], after[name])]
    for one, two in zip(run(tmp_path, ranks=1, steps=2), steps, strict=False):  # on the same samples
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
