"""GRPO with rollouts in bfloat16 and training in float32, with replay and without: how far their log-probabilities are.

A Qwen3-MoE of 8 layers (32 experts, 4 per token) learns the source of Python's standard library; then
examples/grpo_replay.py trains it on two ranks, from each seed with replay and without. Two cores, ten minutes:

    python -m benchmarks.grpo_replay [--plot replay.png]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

KEYS = ("logp_diff", "kl", "clipped")
LABELS = ("mean |difference of log-probabilities|", "KL(rollout, trainer)", "share of tokens beyond the clip range")
Run = dict[str, list[float]]
"""By key of the log, a number for each rollout."""


def write_base(folder: Path) -> Path:
    """The checkpoint that the runs begin with: random weights, then 300 steps of `trimtab train`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from trimtab.train.presets import byte_tokenizer

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64, norm_topk_prob=True, initializer_range=0.05,
        output_router_logits=True, router_aux_loss_coef=0.1, bos_token_id=None, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "random")
    byte_tokenizer().save_pretrained(folder / "random")
    train = ["-m", "trimtab", "train", "--model", folder / "random", "--out", folder / "base", "--overwrite"]
    start(*train, "--lr", 4e-3, "--seq-len", 128, "--max-steps", 300)
    return folder / "base" / "final"


def start(*arguments: object) -> None:
    """Run Python with these to its end, one thread a process. Raises CalledProcessError if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *map(str, arguments)], env=environment, check=True)


def train(base: Path, out: Path, *, replay: bool, steps: int, seed: int) -> Run:
    """One run of the example."""
    script = Path(__file__).parents[1] / "examples" / "grpo_replay.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    way = "--replay" if replay else "--no-replay"
    start(*launcher, script, base, out, way, "--steps", steps, "--seed", seed)
    return read(out)


def read(out: Path) -> Run:
    """What a run has logged of its rollouts."""
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    rollouts = [entry for entry in log if "rollout/kl" in entry]
    keys = ["step", "reward", "rollout/other_experts", *(f"rollout/{key}" for key in KEYS)]
    return {key.removeprefix("rollout/"): [entry[key] for entry in rollouts] for key in keys}


def table(runs: dict[tuple[int, bool], Run]) -> str:
    """A row for each seed and way: means over all rollouts, and the rewards of the first and the last."""
    rows = ["| seed | replay | other experts | mean abs. difference | KL | beyond clip range | reward |"]
    rows.append("|---|---|---|---|---|---|---|")
    for (seed, replay), run in runs.items():
        mean = {key: statistics.mean(values) for key, values in run.items()}
        rows.append(
            f"| {seed} | {'on' if replay else 'off'} | {mean['other_experts']:.2%} | {mean['logp_diff']:.4f} "
            f"| {mean['kl']:.1e} | {mean['clipped']:.2%} | {run['reward'][0]:.2f} to {run['reward'][-1]:.2f} |"
        )
    return "\n".join(rows)


def plot(runs: dict[tuple[int, bool], Run], path: str) -> None:
    """All runs, step by step, to an image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    first = min(seed for seed, _ in runs)
    for (seed, replay), run in runs.items():
        for panel, key in zip(panels, KEYS, strict=True):
            label = ("with replay" if replay else "without replay") if seed == first else None
            panel.plot(run["step"], run[key], color="C0" if replay else "C1", linewidth=1, label=label, clip_on=False)
    for panel, key, label in zip(panels, KEYS, LABELS, strict=True):
        panel.set(xlabel="step", title=label, yscale="log" if key == "kl" else "linear")
        panel.title.set_size("medium")
        if key != "kl":
            panel.set_ylim(bottom=0)
    panels[0].legend(title="a line is a seed", frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_replay"))
    parser.add_argument("--plot", metavar="FILE", help="also draw the curves (needs matplotlib)")
    options = parser.parse_args()
    base = write_base(options.out)
    runs = {
        (seed, replay): train(
            base, options.out / f"{seed}-{'on' if replay else 'off'}", replay=replay, steps=options.steps, seed=seed
        )
        for seed in range(options.seeds)
        for replay in (True, False)
    }
    print(table(runs))
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
