"""`trimtab verify`: the options; what each run prints; 0 only where nothing was found."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cli import Progress
from trimtab.errors import ConfigError
from trimtab.processes import group_size

if TYPE_CHECKING:
    from trimtab.verify.collect import Verdict

SHOWN = 20
"""Failures that are printed as they come."""

HELP = "prove a layer's numbers over ranks and ways for tokens to fall"
DESCRIPTION = """\
Prove the numbers of an MoE layer on these ranks: outputs, input gradients and every parameter's gradient against a
dense float64 truth, over arrangements of ranks and ways for tokens to fall. Nothing may hang, and bad input must raise.

  trimtab verify --quick                             under a minute on two cores
  trimtab verify                                     1 to 8 local ranks, fp32 and bf16
  torchrun --nproc-per-node 8 -m trimtab verify      on the ranks, devices and backend of a cluster
  trimtab verify --impl MODULE:CLASS --quick         judge another implementation

Exit code: 0 nothing found, 1 something found, 2 the arguments cannot be used.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add = parser.add_argument
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="seventeen arrangements of up to 4 ranks, float32")
    level.add_argument("--full", action="store_true", help="also in float64, and each with hot experts on more ranks")
    add("--impl", default="trimtab", metavar="NAME", help="trimtab (default), or MODULE:CLASS of your own")
    add("--nproc", type=int, metavar="N", help="local ranks at most (default 8, with --quick 4; not under torchrun)")
    add("--only", nargs="+", default=[], metavar="CASE", help="names, words or globs of TOPOLOGY/PATTERN/DTYPE")
    add("--seed", type=int, default=0, metavar="N", help="of all data (default 0)")
    add("--repeat", type=int, default=1, metavar="N", help="run each case N times: every bit must be the same")
    add("--deadline", type=float, default=60.0, metavar="S", help="seconds after which a case hangs (default 60)")
    add("--out", default="runs/verify", metavar="DIR", help="for ledger.json and ledger.md (default runs/verify)")


def run(options: argparse.Namespace) -> int:
    """Run what was asked for; returns 0 if nothing was found, else 1."""
    if options.repeat < 1 or not 0 < options.deadline < math.inf or (options.nproc is not None and options.nproc < 1):
        raise ConfigError("--repeat and --nproc must be at least 1, --deadline more than 0, and a number")
    import torch

    from trimtab.kernels.choose import KernelChoice
    from trimtab.verify.cases import plan_cases
    from trimtab.verify.implementation import get_implementation
    from trimtab.verify.ledger import MOST_LOCAL, Ledger
    from trimtab.verify.run import run_cluster, run_local

    cluster = group_size(options.nproc)
    program = "torchrun … -m trimtab" if cluster else "trimtab"
    level = "quick" if options.quick else "full" if options.full else "default"
    if ":" in options.impl:
        sys.path.insert(0, os.getcwd())  # where `python -m` finds modules as well; the ranks inherit it
    get_implementation(options.impl)
    world = cluster or options.nproc or (4 if options.quick else MOST_LOCAL)
    cases = plan_cases(level, world, only=options.only, seed=options.seed)
    out = Path(options.out)
    first = not cluster or os.environ["RANK"] == "0"
    if first:  # before hours are spent on what goes into it
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
    command = f"{program} {shlex.join(options.arguments)}"
    ledger = Ledger(
        implementation=options.impl, program=program, command=command, seed=options.seed, repeat=options.repeat
    )
    start = time.perf_counter()
    progress = Progress(len(cases), shown=first)

    def report(verdict: Verdict) -> None:
        ledger.verdicts.append(verdict)
        if verdict.failed and len(ledger.failures) <= SHOWN:
            progress.say(ledger.explain(verdict))
        progress.step(f"{len(ledger.failures)} failed")

    def finish() -> int:
        progress.close()
        ledger.seconds = time.perf_counter() - start
        print(ledger.table(), "", ledger.summary(), sep="\n", flush=True)
        ledger.write(out)
        if (more := len(ledger.failures) - SHOWN) > 0:
            print(f"{more} further failures are in the ledger")
        print(f"ledger: {out / 'ledger.md'}, {out / 'ledger.json'}", flush=True)
        return int(bool(ledger.failures))

    how: dict[str, Any] = {"deadline": options.deadline, "repeat": options.repeat}
    if cluster:
        return run_cluster(cases, options.impl, report=report, finish=finish, **how)
    if options.impl == "trimtab":  # what ranks say is heard where they fail: a compiler's words come from here
        KernelChoice().on(torch.device("cpu"), torch.float32)
    for verdict in run_local(cases, options.impl, **how):
        report(verdict)
    return finish()
