"""`trimtab train`: the options, and the words of a run that ends early."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError, first_line
from trimtab.extras import required
from trimtab.processes import Interrupted, group_size
from trimtab.train.config import FIXED, OPTIONS, TrainConfig, flag_of
from trimtab.train.hub import on_this_disk
from trimtab.train.launch import launch
from trimtab.train.report import CHECKPOINTS, FINAL, METRICS, finished
from trimtab.train.resume import advice, resumed

HELP = "train or fine-tune a MoE model"
DESCRIPTION = """\
Train a Mixture-of-Experts language model with transformers' Trainer, its experts spread over the ranks.

  trimtab train --nproc 4                              a small model on the Python standard library
  trimtab train --model ./Qwen3-30B-A3B --data chat.jsonl --nproc 8 --out runs/chat
  torchrun --nnodes 4 --nproc-per-node 8 -m trimtab train --model … --out …
  trimtab train --model ./Qwen3-30B-A3B --data chat.jsonl --lora 16 --quantize nf4      adapters alone, in peft's files
  trimtab train --nproc 4 --save-every 50              checkpoints on the way
  trimtab train --nproc 4 --resume runs/train          … and on from the latest, bit for bit, with the options of then
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options: those of `TrainConfig`, and two about how it is started."""
    parser.set_defaults(parser=parser)
    parser.add_argument("--config", metavar="FILE", help="a YAML file of these options, as run.json of a run is one")
    parser.add_argument("--nproc", type=int, metavar="N", help="start N local ranks (default: one; not under torchrun)")
    add_fields(parser, [field.name for field in OPTIONS])


def add_fields(parser: argparse.ArgumentParser, names: Container[str]) -> None:
    """Add the options of `TrainConfig` with these names."""
    groups: dict[str, Any] = {}
    for field in (field for field in OPTIONS if field.name in names):
        about, kind = field.metadata, str(field.type).split(" ")[0]
        name = about["group"]
        groups[name] = groups.get(name) or parser.add_argument_group(name)
        how: dict[str, Any] = {"metavar": about["shown"], "type": {"int": int, "float": float}.get(kind, str)}
        how = {"action": "store_true"} if kind == "bool" else how
        how |= {"nargs": "+"} if isinstance(field.default, tuple) else {}
        groups[name].add_argument(flag_of(field.name), help=about["help"], default=argparse.SUPPRESS, **how)


def run(options: argparse.Namespace) -> int:
    """Train; returns 0, also where there is nothing left to do, or 128 + the signal that ended the run."""
    if options.config is not None:
        own = options.arguments[options.arguments.index("train") + 1 :]
        options = options.parser.parse_args([*_from_file(Path(options.config)), *own])
    names = {field.name for field in OPTIONS} | {"debug"}
    given = {name: value for name, value in vars(options).items() if name in names}
    given = on_this_disk(given)
    if "resume" in given and (words := _nothing_to_resume(given)):
        if os.environ.get("RANK", "0") == "0":
            print(words, flush=True)
        return 0
    config = resumed(given) if "resume" in given else TrainConfig.of(given)
    out = Path(config.out)
    before = _stamp(out / METRICS)
    try:
        launch(config, options.nproc)
    except Interrupted as stop:
        began = config.resume is not None or _stamp(out / METRICS) not in (None, before)
        name, how_far = signal.Signals(stop.number).name, _how_far(out, options.nproc, began)
        print(f"\ntrimtab: interrupted by {name} {how_far}", file=sys.stderr, flush=True)
        return 128 + stop.number
    if config.dry_run and os.environ.get("RANK", "0") == "0":
        from trimtab.plan.table import memory_lines

        print(*memory_lines(config, group_size(options.nproc) or options.nproc or 1), sep="\n")
    return 0


def _from_file(path: Path) -> list[str]:
    """The arguments that a YAML file stands for. Raises ConfigError for one that holds none."""
    yaml = required("yaml", "--config", "train")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({first_line(error)})") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--config {path}: must hold options by name, as in `seq_len: 512`")
    arguments: list[str] = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if values and value is not None and value is not False:
            arguments += [flag_of(str(name)), *(str(each) for each in values if each is not True)]
    return arguments


def _nothing_to_resume(given: dict[str, Any]) -> str | None:
    """Words where that run has ended well: an end and no error, for schedulers start a command until it ends well.
    Raises ConfigError for options that ask for another run."""
    found = finished(Path(given["resume"]))
    if found is None or given.get("overwrite") or Path(given.get("out", found[0])).resolve() != found[0].resolve():
        return None
    out, options = found
    for name in (*FIXED, "merge", "save_dtype"):
        if name in given and given[name] != options.get(name) and name != "model":
            raise ConfigError(
                f"{flag_of(name)} {given[name]}: the run of {out} is finished and had {options.get(name)}; begin "
                f"another from its model: --model {out / FINAL}, with another --out"
            )
    steps = options["max_steps"] or sum(1 for _ in (out / METRICS).open(encoding="utf-8"))
    return f"finished at step {steps}, nothing to resume; the model is in {out / FINAL}"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells a file from a later one of that name, and from itself with more in it; None where there is none."""
    found = path.stat() if path.exists() else None
    return found and (found.st_mtime_ns, found.st_size)


def _how_far(out: Path, nproc: int | None, began: bool) -> str:
    done, final = out / METRICS, out / FINAL
    if not began:
        earlier = any(path.exists() for path in (done, out / CHECKPOINTS, final))
        return "before its first step; " + (
            f"what {out} holds is an earlier run's" if earlier else "no model was saved"
        )
    steps = sum(1 for _ in done.open(encoding="utf-8")) if done.exists() else 0
    unsaved = "no model was saved" if not final.exists() else f"the model is in {final}"
    return f"after {steps} step(s); {advice(out, nproc) or unsaved}; metrics are in {done}"
