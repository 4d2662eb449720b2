"""`trimtab train`: the options, and who is told when it ends early."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from trimtab.interrupted import Interrupted
from trimtab.train.config import DTYPES, TrainConfig
from trimtab.train.launch import launch
from trimtab.train.report import FINAL, METRICS
from trimtab.train.resume import CHECKPOINTS, advice, resumed

HELP = "train or fine-tune a MoE model"
DESCRIPTION = """\
Train a Mixture-of-Experts language model with transformers' Trainer, its experts spread over the ranks.

  trimtab train --nproc 4                              a small model on the Python standard library
  trimtab train --model ./Qwen3-30B-A3B --data chat.jsonl --nproc 8 --out runs/chat
  torchrun --nnodes 4 --nproc-per-node 8 -m trimtab train --model … --out …
  trimtab train --nproc 4 --save-every 50              checkpoints on the way
  trimtab train --nproc 4 --resume runs/train          … and on from the latest, bit for bit; but for --nproc, options
                                                       are as they were
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add = parser.add_argument
    add("--model", metavar="NAME|PATH", help="preset (qwen3_moe, mixtral, olmoe, gpt_oss, deepseek_v3) or checkpoint")
    add("--data", nargs="+", metavar="FILE|DIR", help="text in UTF-8, or .jsonl with `text` or `messages`")
    add("--out", metavar="DIR", help="where everything is written, shared by all hosts (default runs/train)")
    add("--nproc", type=int, metavar="N", help="start N local ranks (default: one process; not under torchrun)")
    add("--ep", type=int, metavar="N", help="ranks that share the experts (default: as many as fit)")
    add("--fsdp", type=int, metavar="N", help="ranks that share the other weights (default: what is left)")
    add("--tp", type=int, metavar="N", help="tensor-parallel ranks (default 1)")
    add("--replicate", type=int, metavar="N", help="copies of the sharded model (default 1)")
    add("--max-steps", type=int, metavar="N", help="optimizer steps (default 100)")
    add("--batch-size", type=int, metavar="N", help="sequences per data-parallel rank (default 8)")
    add("--seq-len", type=int, metavar="N", help="tokens per sequence (default 128 for presets, 512 for checkpoints)")
    add("--grad-accum", type=int, metavar="N", help="batches per optimizer step, each balanced by itself (default 1)")
    add("--lr", type=float, metavar="X", help="peak learning rate (default 4e-3 for presets, 2e-5 for checkpoints)")
    add("--warmup", type=int, metavar="N", help="warm-up steps (default: a tenth of the steps, at most 100)")
    add("--seed", type=int, metavar="N", help="of a preset's weights and the order of the data (default 0)")
    add("--dtype", metavar="|".join(DTYPES), help="what the model computes in (default float32)")
    add("--save-every", type=int, metavar="N", help="write a checkpoint every N steps to DIR/checkpoints")
    add("--keep", type=int, metavar="N", help="keep the latest N checkpoints (default: all)")
    add("--stop-after", type=int, metavar="N", help="write a checkpoint after step N and end")
    add(
        "--resume",
        metavar="DIR",
        help="go on from a run's latest checkpoint, or from the one given; --model says where its model lies now",
    )
    add(
        "--overwrite",
        action="store_true",
        help="remove what is in the way in DIR: a model and checkpoints, with --resume those after the one given",
    )


def run(options: argparse.Namespace) -> int:
    """Train; returns 0, or 128 + the signal that ended the run. Errors are raised."""
    own = ("run", "command", "arguments", "nproc")
    given = {k: v for k, v in vars(options).items() if v is not None and k not in own}
    if "data" in given:
        given["data"] = tuple(given["data"])
    config = resumed(given) if "resume" in given else TrainConfig(**given)
    out = Path(config.out)
    before = _stamp(out / METRICS)
    try:
        launch(config, options.nproc)
    except Interrupted as stop:
        unbegun = config.resume is None and _stamp(out / METRICS) in (None, before)
        how_far = _unbegun(out) if unbegun else _how_far(out, options.nproc)
        print(f"\ntrimtab: interrupted by {signal.Signals(stop.number).name} {how_far}", file=sys.stderr, flush=True)
        return 128 + stop.number
    return 0


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Tells a file from a later one of that name, and from itself with more in it; None where there is none."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _unbegun(out: Path) -> str:
    earlier = any((out / name).exists() for name in (METRICS, CHECKPOINTS, FINAL))
    held = f"what {out} holds is an earlier run's" if earlier else "no model was saved"
    return f"before its first step; {held}"


def _how_far(out: Path, nproc: int | None) -> str:
    done, final = out / METRICS, out / FINAL
    steps = sum(1 for _ in done.open(encoding="utf-8")) if done.exists() else 0
    unsaved = "no model was saved" if not final.exists() else f"the model is in {final}"
    return f"after {steps} step(s); {advice(out, nproc) or unsaved}; metrics are in {done}"
