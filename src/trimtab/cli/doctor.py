"""`trimtab doctor`: what runs here and what does not; where the ranks of a job stand, and where it stopped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.doctor import Finding

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
    from trimtab.doctor import as_text

    told, broken = [], 0
    for name, findings in _parts(options):
        told += [{"part": name, **asdict(finding)} for finding in findings]
        broken += sum(finding.severity == "broken" for finding in findings)
        if not options.json:
            print(f"{name}\n{as_text(findings)}\n", flush=True)
    if options.json:
        print(json.dumps({"ok": not broken, "findings": told}, indent=2))
    elif not (options.trace or options.places):
        print(f"{broken} broken: see the lines that begin so" if broken else "all is well")
    return int(bool(broken))


def _parts(options: argparse.Namespace) -> Iterator[tuple[str, list[Finding]]]:
    """Each part's name and findings, as soon as they are known. Traces are read without torch."""
    if options.trace:
        from trimtab.doctor.flight_recorder import read_traces
        from trimtab.doctor.flight_recorder_diagnosis import diagnose

        traces = read_traces([Path(path) for path in options.trace])
        yield f"Flight Recorder, rank {', '.join(str(trace.rank) for trace in traces)}", diagnose(traces)
        return
    from trimtab.doctor import backends, machine
    from trimtab.guard.record import places_here

    if options.places:
        yield "ranks of this host", machine.judge_places(places_here())
        return
    yield "versions", machine.versions()
    yield "machine and environment", machine.environment()
    yield "process groups", backends.process_groups()
    yield "kernels, self-tested", backends.kernels()
    yield "a layer over two processes", list(backends.layer())
