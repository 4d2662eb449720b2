"""`trimtab plan`: the options, the table of layouts, and the command that runs the best of them."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cli import Progress
from trimtab.cli.train import add_fields
from trimtab.errors import ConfigError
from trimtab.extras import required
from trimtab.train.config import OPTIONS, Mesh, TrainConfig, flag_of
from trimtab.train.hub import on_this_disk
from trimtab.train.plan import check_names

if TYPE_CHECKING:
    from trimtab.plan.layouts import Layout

HELP = "what every rank of a run will hold, and in which layouts it fits"
DESCRIPTION = """\
Run one rank's step of `trimtab train` without values, in each layout of the ranks, and say what it holds at the most,
when, and of what. No GPU, no weights and no other rank are needed: a folder with config.json is enough.

  trimtab plan --model ./Qwen3-30B-A3B --ranks 16 --gb 80 --dtype bfloat16 --seq-len 4096 --batch-size 1
  trimtab plan --model ./Qwen3-30B-A3B --ranks 8 --gb 80 --lora 16 --quantize nf4 --skew worst
  trimtab plan --model ./Qwen3-30B-A3B --ranks 16 --gb 80 --ep 8 --skew runs/first/metrics.jsonl

--ep, --fsdp, --tp, --replicate and --gradient-checkpointing leave only the layouts that have them.
"""
GROUPS = ("model", "adapters", "ranks")
NAMES = ("seq_len", "batch_size", "grad_accum", "optim")
FIELDS = {o.name for o in OPTIONS if o.metadata["group"] in GROUPS or o.name in NAMES} - {"merge"}
"""Options of `trimtab train` that a step's memory depends on."""
HOST = 8
"""Ranks of a host."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options: its own, and those of `trimtab train` that a step's memory depends on."""
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N", help="ranks of the run, on all hosts together")
    add("--gb", type=float, metavar="G", help="memory of a rank in GB, of 10^9 bytes")
    skews = "how tokens fall: even (default), zipf, hot_rank … worst, which bounds the exchange; or a metrics.jsonl"
    add("--skew", default="even", metavar="NAME|FILE", help=skews)
    add("--device", default="cuda", choices=("cuda", "cpu"), help="what the ranks have (default cuda)")
    add("--layouts", type=int, default=12, metavar="N", help="try so many layouts of those that divide (default 12)")
    add("--tflops", type=float, default=989.0, metavar="X", help="of a rank at most (default 989, an H100's in bf16)")
    add("--link", type=float, default=450.0, metavar="X", help="GB/s that leave it at the most (default 450)")
    add("--out", default="runs/plan", metavar="DIR", help="for plan.json and plan.png (default runs/plan)")
    add_fields(parser, FIELDS)


def run(options: argparse.Namespace) -> int:
    """Plan; returns 0 if a layout fits, else 1."""
    counts = options.ranks, options.layouts, options.tflops, options.link, options.gb
    if not all(count is None or count > 0 for count in counts):
        raise ConfigError("--ranks, --gb, --layouts, --tflops and --link must be more than 0")
    given = {name: getattr(options, name) for name in sorted(FIELDS) if hasattr(options, name)}
    config = TrainConfig.of(on_this_disk(given)).resolved()
    required("transformers", "trimtab plan", "train")
    from trimtab.plan.device import DEVICES
    from trimtab.plan.layouts import meshes, plan_layout
    from trimtab.plan.picture import draw
    from trimtab.plan.table import quiet, table
    from trimtab.train.models import inspect, num_experts

    check_names(config)
    rates = {"flops": options.tflops * 1e12, "link": options.link * 1e9}
    device = replace(DEVICES[options.device], bytes=options.gb and options.gb * 1e9, **rates)
    if device.room <= 0:
        raise ConfigError(f"--gb {options.gb:g}: no more than what --device {device.kind} takes beside tensors")
    skeleton = quiet(options.debug)(inspect)(config.model, config.attn)
    every = list(meshes(config, options.ranks, experts := num_experts(skeleton)))
    if not every:
        raise ConfigError(f"--ranks {options.ranks}: no layout divides them with {experts} experts and these options")
    out, skews = Path(options.out), list(dict.fromkeys(("even", options.skew, "worst")))
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress(min(len(every), options.layouts) + len(skews) - 1, unit="layout")

    @quiet(options.debug)
    def planned(config: TrainConfig, mesh: Mesh, skew: str) -> Layout:
        row = plan_layout(config, mesh, device, skew, skeleton=skeleton)
        progress.step()
        return row

    rows = [planned(each, mesh, options.skew) for each, mesh in every[: options.layouts]]
    rows.sort(key=lambda row: (bool(row.refused), row.left < 0, row.seconds if row.left >= 0 else -row.left))
    best, skewed = rows[0], []
    if best.left >= 0 and best.mesh.ep > 1:
        skewed = [best if skew == options.skew else planned(best.config, best.mesh, skew) for skew in skews]
    progress.close()
    print(*table(rows, device), sep="\n")
    if skewed:
        fits = [f"{row.skew} {row.peak[1] / 1e9:.3g}{'' if row.left >= 0 else ' (does not fit)'}" for row in skewed]
        print(f"skew    the first layout, in GB: {', '.join(fits)}")
    if n := len(every) - len(rows):
        print(f"{n} further layouts divide and were not tried: --layouts {len(every)}, or fix --ep, --tp, --replicate")
    told = {name: [row.as_json() for row in each] for name, each in (("layouts", rows), ("skew", skewed))}
    told = {"ranks": options.ranks, "gb": options.gb, **told}
    (out / "plan.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"json    {out / 'plan.json'}")
    if not best.refused:
        print(f"picture {draw(best, out / 'plan.png')}")
    if best.left >= 0:
        print(f"run     {command(best, given, options.ranks)}")
    return int(best.left < 0)


def command(row: Layout, given: dict[str, Any], ranks: int) -> str:
    """The command of `trimtab train` that runs a layout; of more ranks than `HOST`, on hosts of so many."""
    start = ["trimtab", "train", "--nproc", str(ranks)]
    if ranks > HOST and ranks % HOST == 0:
        start = ["torchrun", "--nnodes", str(ranks // HOST), "--nproc-per-node", str(HOST), "-m", *start[:2]]
    for name, value in {**given, **row.options}.items():
        start += [] if value is False else [flag_of(name), *([] if value is True else [str(value)])]
    return shlex.join(start) + " --data …"
