"""`trimtab plan`: the options, the table of layouts, and the command that runs the best of them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cli import Progress
from trimtab.cli.train import add_fields
from trimtab.errors import ConfigError
from trimtab.train.config import OPTIONS, TrainConfig, flag_of
from trimtab.train.hub import on_this_disk

if TYPE_CHECKING:
    from trimtab.plan.layouts import Layout, Machine

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
WIDTHS = {"weights": 7, "moments": 7, "gradients": 9, "activations": 11, "exchange": 8, "copies": 6, "gathered": 8}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options: its own, and those of `trimtab train` that a step's memory depends on."""
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N", help="ranks of the run, on all hosts together")
    add("--gb", type=float, metavar="G", help="memory of a rank in GB, of 10^9 bytes")
    add("--skew", default="even", metavar="NAME|FILE", help="how tokens fall: even (default), zipf, hot_rank … worst, "
        "which bounds all, or a run's metrics.jsonl or loads.jsonl")  # fmt: skip
    add("--device", default="cuda", choices=("cuda", "cpu"), help="what the ranks have (default cuda)")
    add(
        "--layouts", type=int, default=12, metavar="N", help="layouts that are tried, of those that divide (default 12)"
    )
    add("--tflops", type=float, default=989.0, metavar="X", help="of a rank at the most (default 989: H100, bfloat16)")
    add("--link", type=float, default=50.0, metavar="X", help="GB/s that leave a rank at the most (default 50)")
    add("--per-host", type=int, default=8, metavar="N", help="ranks of a host, for the command (default 8)")
    add("--out", default="runs/plan", metavar="DIR", help="for plan.json and plan.png (default runs/plan)")
    add_fields(
        parser, [o.name for o in OPTIONS if o.name in NAMES or o.metadata["group"] in GROUPS and o.name != "merge"]
    )


def run(options: argparse.Namespace) -> int:
    """Plan; returns 0 if a layout fits, else 1."""
    if (
        options.ranks < 1
        or options.layouts < 1
        or not all(x > 0 for x in (options.gb or 1, options.tflops, options.link))
    ):
        raise ConfigError("--ranks, --layouts, --gb, --tflops and --link must be more than 0")
    given = {o.name: getattr(options, o.name) for o in OPTIONS if hasattr(options, o.name)}
    asked = TrainConfig.of(on_this_disk(given))
    from trimtab.plan.layouts import Machine, meshes, plan_layout, skeleton_of
    from trimtab.plan.picture import draw

    whole = None if options.gb is None else options.gb * 1e9
    machine = Machine(kind=options.device, bytes=whole, flops=options.tflops * 1e12, link=options.link * 1e9)
    config, (skeleton, experts) = asked.resolved(), skeleton_of(asked)
    every = list(meshes(config, options.ranks, experts))
    if not every:
        raise ConfigError(f"--ranks {options.ranks}: no layout divides them with {experts} experts and these options")
    chosen, rows = every[: options.layouts], list[Any]()
    progress = Progress(len(chosen) + 2, unit="layout")
    for each, mesh in chosen:
        rows.append(plan_layout(each, mesh, machine, options.skew, skeleton=skeleton))
        progress.step()
    rows.sort(key=lambda row: (bool(row.refused), row.left < 0, row.seconds if row.left >= 0 else -row.left))
    best, skewed = rows[0], list[Any]()
    for skew in {"even": 0, options.skew: 0, "worst": 0} if best.mesh.ep > 1 and not best.refused else ():
        own = best if skew == options.skew else plan_layout(best.config, best.mesh, machine, skew, skeleton=skeleton)
        skewed.append(own)
        progress.step(count=int(own is not best))
    progress.close()
    print("\n".join([*table(rows, machine), *skew_lines(skewed)]))
    if len(every) > len(chosen):
        print(
            f"{len(every) - len(chosen)} further layouts were not tried: --layouts {len(every)}, or name what is fixed"
        )
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    told = {"ranks": options.ranks, "gb": options.gb, "layouts": [row.as_json() for row in rows]}
    told["skew"] = [row.as_json() for row in skewed]
    (out / "plan.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if not best.refused:
        print(f"picture {draw(best, out / 'plan.png') or out / 'plan.png'}")
    print(f"json    {out / 'plan.json'}")
    if best.left >= 0:
        print("run     " + command(best, given, options.ranks, options.per_host))
    return int(best.left < 0)


def table(rows: Iterable[Layout], machine: Machine) -> Iterator[str]:
    """A line for each layout, in GB, under their heading; and what the machine adds."""
    parts = "".join(f"{name:>{width + 1}}" for name, width in WIDTHS.items())
    kept = "" if machine.bytes is None else f" {machine.bytes / 1e9:g} GB, {machine.device.free:.0%} kept free"
    yield f" ep fsdp  tp copies recompute |   peak{parts}   other | at least s | fits{kept}"
    for row in rows:
        mesh = row.mesh
        line = f"{mesh.ep:3}{mesh.fsdp:5}{mesh.tp:4}{mesh.replicate:7}{'yes' if row.config.gradient_checkpointing else 'no':>10} |"
        if row.stages is not None:
            stage, most, held = row.peak
            line += f"{most / 1e9:7.2f}" + "".join(
                f"{held[name] / 1e9:{width + 1}.2f}" for name, width in WIDTHS.items()
            )
            line += f"{held['other'] / 1e9:8.2f} |{row.seconds:11.3g} | {row.words}, at its most in the {stage}"
        yield line if row.stages is not None else f"{line} {row.words}"
    outside = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in machine.device.outside.items())
    if outside:
        yield f"beside the peak, in what fits: {outside}; sizes are rounded up to {machine.device.rounding} bytes"


def skew_lines(rows: Iterable[Layout]) -> Iterator[str]:
    """What the same layout holds as tokens fall otherwise."""
    told = [f"{row.skew} {row.peak[1] / 1e9:.2f}{'' if row.left >= 0 else ' (does not fit)'}" for row in rows]
    if told:
        yield f"skew    the first layout, in GB: {', '.join(told)}"


def command(row: Layout, given: dict[str, Any], ranks: int, per_host: int) -> str:
    """The command of `trimtab train` that runs a layout."""
    hosts, local = divmod(ranks, per_host)
    start = ["trimtab", "train", "--nproc", str(ranks)]
    if hosts > 1 and not local:
        start = ["torchrun", "--nnodes", str(hosts), "--nproc-per-node", str(per_host), "-m", "trimtab", "train"]
    for name, value in given.items():
        if name not in ("ep", "fsdp", "tp", "replicate", "gradient_checkpointing"):
            start += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    return shlex.join([*start, *row.flags]) + " --data …"
