"""`trimtab doctor`: what runs here and what does not; where the ranks of a job stand, and where it stopped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.doctor.findings import Part

HELP = "check this machine, or say where a job stopped"
DESCRIPTION = """\
Look at this machine: versions, devices, environment, process groups, kernels (self-tested) and a layer over two
processes. With --places, say in which layer and phase each rank of a running job on this host stands, without asking
it. With --trace, say in MoE words where a job stopped, from PyTorch Flight Recorder dumps of its ranks.

  trimtab doctor
  trimtab doctor --places
  trimtab doctor --trace nccl_trace_rank_*

Exit code: 0 all is well, 1 something that trimtab needs is broken, or a job or a rank stopped.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    job = parser.add_mutually_exclusive_group()
    job.add_argument("--places", action="store_true", help="where each rank of this host stands")
    job.add_argument("--trace", nargs="+", metavar="PATH", help="dumps of all ranks, or folders of them")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Print findings; returns 1 if any of them is broken, else 0."""
    # Imported here: the other subcommands start without them, and reading traces starts without torch.
    from trimtab.doctor.findings import as_json, as_text, exit_code
    from trimtab.doctor.flight_recorder import read_traces
    from trimtab.doctor.flight_recorder_diagnosis import diagnose

    seen: list[Part] = []
    if options.trace:
        traces = read_traces([Path(path) for path in options.trace])
        ranks = ", ".join(str(trace.rank) for trace in traces)
        parts: Iterable[Part] = [(f"Flight Recorder, rank {ranks}", diagnose(traces))]
    elif options.places:
        from trimtab.doctor.checkup import judge_places
        from trimtab.guard.record import places_here

        parts = [("ranks of this host", judge_places(places_here()))]
    else:
        from trimtab.doctor.checkup import checkup

        parts = checkup()
    for name, findings in parts:
        seen.append((name, findings))
        if not options.json:
            print(f"{name}\n{as_text(findings)}\n", flush=True)
    every = [finding for _, findings in seen for finding in findings]
    if options.json:
        print(json.dumps(as_json(seen), indent=2))
    elif not (options.trace or options.places):
        broken = sum(finding.severity == "broken" for finding in every)
        print(f"{broken} broken: see the lines that begin so" if broken else "all is well")
    return exit_code(every)
