"""`python -m benchmarks`: speed beside peers and the limit, in one run; the page that shows it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.names import AUTOCAST, WORKLOADS
from trimtab.cli.main import exit_code
from trimtab.errors import BackendError

if TYPE_CHECKING:
    from benchmarks.result import Record
    from benchmarks.task import Task

DESCRIPTION = """\
Race trimtab against other implementations and against the limit of the machine. Every contestant lives in processes
of its own, is checked, warmed up, and takes turns with the others; with malloc as it comes and with a tuned one.

  python -m benchmarks layer --shape A --tokens 2048 --dtype bf16 --peers grouped_mm
  python -m benchmarks layer --shape 1024,512,32,4 --ranks 2 --peers all_to_all --transports alltoall shared_memory
  python -m benchmarks layer --workloads balanced zipf hot
  python -m benchmarks layer --dtype autocast --peers grouped_mm eager
  python -m benchmarks layer --family gpt_oss --tokens 4 2048 --peers trimtab-hf grouped_mm eager
  python -m benchmarks kernels --shape A --tokens 2048
  python -m benchmarks exchange --ranks 2 4 --tokens 8192 --peers all_to_all
  python -m benchmarks train --ranks 2 --peers stock
  python -m benchmarks all --out docs           everything, the most important first; goes on where it was stopped
  python -m benchmarks page results/*.json --out docs/benchmarks.md

Peers are imported only where they are named: grouped_mm, eager, batched_mm, all_to_all (transformers), torchtitan,
trimtab-hf (trimtab inside transformers). A contestant that cannot run is a line with its reason.
"""
PLACES = ("--out", "--results", "--json", "--chart")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all parts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="WHAT")
    made = {
        "layer": parts.add_parser("layer", help="one experts layer, forward and forward+backward"),
        "kernels": parts.add_parser("kernels", help="grouped GEMMs, moving rows, plans"),
        "exchange": parts.add_parser("exchange", help="dispatch and combine between ranks"),
        "train": parts.add_parser("train", help="training steps of a preset"),
        "all": parts.add_parser("all", help="all that the page shows; can be stopped and goes on"),
    }
    for name in ("layer", "kernels", "exchange"):
        add = made[name].add_argument
        add("--shape", nargs="+", default=["A"], metavar="D,F,E,K", help="or A, B, C: 512,256,64,8; 1024,512,32,4; …")
        add("--tokens", nargs="+", type=int, default=[2048], metavar="N", help="per rank (default 2048)")
        more = (AUTOCAST,) if name == "layer" else ()
        add(
            "--dtype", nargs="+", default=["bf16"], choices=("fp32", "bf16", *more),
            help="autocast: parameters and tokens in fp32, products in bf16" if more else None,
        )  # fmt: skip
    for name in ("layer", "kernels", "train"):
        made[name].add_argument(
            "--threads", nargs="+", type=int, default=[1], metavar="N", help="of each rank (default 1)"
        )
    for name, ranks in (("layer", [1]), ("exchange", [2]), ("train", [1])):
        made[name].add_argument("--ranks", nargs="+", type=int, default=ranks, metavar="N")
        made[name].add_argument(
            "--peers", nargs="+", default=[], metavar="NAME", help="who else races (default nobody)"
        )
    for name in ("layer", "exchange"):
        made[name].add_argument(
            "--transports",
            nargs="+",
            metavar="NAME",
            help="alltoall, shared_memory (default: both), allgather, auto",
        )
    for name in ("layer", "kernels"):
        made[name].add_argument("--kernels", nargs="+", metavar="NAME", help="auto, loop, stock, compiled")
    for name in ("kernels", "exchange"):
        made[name].add_argument("--workloads", nargs="+", default=["balanced"], choices=WORKLOADS, metavar="NAME")
    add = made["layer"].add_argument
    add("--workloads", nargs="+", default=["balanced"], choices=WORKLOADS, metavar="NAME",
        help=f"{', '.join(WORKLOADS)}; several race each other")  # fmt: skip
    add("--family", default="qwen3_moe", choices=("qwen3_moe", "gpt_oss"), help="whose experts (default qwen3_moe)")
    where = "gradients of weights are added to what is there: ours into main_grad, peers' into .grad"
    add("--in-place", action="store_true", help=where)
    add("--memory", action="store_true", help="measure peak memory as well")
    add("--modes", nargs="+", default=["forward", "forward+backward"], choices=("forward", "forward+backward"))
    add = made["train"].add_argument
    add("--preset", default="qwen3_moe", metavar="NAME")
    add("--batch-size", type=int, default=8, metavar="N")
    add("--seq-len", type=int, default=128, metavar="N")
    add = made["all"].add_argument
    add(
        "--out", type=Path, default=Path("docs"), metavar="DIR", help="for benchmarks.md, benchmarks.png (default docs)"
    )
    add(
        "--results", type=Path, default=Path("runs/bench"), metavar="DIR", help="one file per case (default runs/bench)"
    )
    add("--quick", action="store_true", help="a few small cases, to see that it all runs")
    add("--only", nargs="+", default=[], metavar="WORD", help="cases whose file name has all these words")
    add("--list", action="store_true", help="print the cases that are left, in their order, and stop")
    for subparser in made.values():
        add, (turns, seconds) = subparser.add_argument, (3, 4.0) if subparser is made["all"] else (5, 20.0)
        add("--turns", type=int, default=turns, metavar="N", help=f"of every contestant, at least (default {turns})")
        add("--seconds", type=float, default=seconds, metavar="S",
            help=f"for all turns of a race: more turns while they last (default {seconds:.0f})")  # fmt: skip
        add("--malloc", default="both", choices=("both", "default", "tuned"))
        add(
            "--patience", type=float, default=600.0, metavar="S", help="give a silent contestant up after (default 600)"
        )
        add("--debug", action="store_true", help="show tracebacks")
        if subparser is not made["all"]:
            add("--json", type=Path, metavar="FILE", help="all raw times, machine, versions, command")
            add("--chart", type=Path, metavar="FILE.png", help="time over the limit (needs trimtab[plot])")
            add("--markdown", action="store_true", help="print Markdown")
        subparser.set_defaults(run=run_all if subparser is made["all"] else run)
    shown = parts.add_parser("page", help="the page of results that were measured before")
    shown.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    shown.add_argument("--out", type=Path, required=True, metavar="FILE.md")
    shown.add_argument("--chart", type=Path, metavar="FILE.png", help="drawn, and shown on the page")
    shown.add_argument("--debug", action="store_true", help="show tracebacks")
    shown.set_defaults(run=run_page)
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure; returns 0 where every contestant of ours ran, else 1."""
    from benchmarks.chart import check_chart, draw
    from benchmarks.choose import tasks_of
    from benchmarks.store import check_place, write_records

    records: list[Record] = []
    tasks = tasks_of(options)
    if options.chart is not None:
        check_chart(options.chart)
    if options.json is not None:
        check_place(options.json)
    for task in tasks:  # all of it is checked before the first is measured
        records.append(_measure(task, options))
        _print(records[-1], options.markdown)
        if options.json is not None:
            write_records(records, options.json)
    if options.chart is not None:
        draw(records, options.chart)
    return _code(records)


def run_all(options: argparse.Namespace) -> int:
    """Measure what has no results of these sources and write the page of all that has any; as `run`."""
    from benchmarks.campaign import Campaign
    from benchmarks.store import check_place

    campaign = Campaign(options.results, quick=options.quick, only=options.only)
    left = campaign.left()
    if options.list:
        print("\n".join(map(str, left)))
        return 0
    page, chart = options.out / "benchmarks.md", _chart(options.out / "benchmarks.png")
    for file in (page, *left):
        check_place(file)
    records = []
    for record in campaign.run(lambda task: _measure(task, options)):
        records.append(record)
        _print(record, markdown=False)
        _say(f"{len(records)} of {len(left)} cases done, this one in {record.settings['took']:.0f} s")
    _write_page(campaign.measured(), page, chart)
    print(f"page: {page}")
    return _code(records)


def _chart(png: Path) -> Path | None:
    """The same, or None without matplotlib: the page needs no picture. Raises InputError where it cannot be written."""
    from benchmarks.chart import check_chart

    try:
        check_chart(png)
    except BackendError as error:
        _say(f"the page will have no picture: {error}")
        return None
    return png


def run_page(options: argparse.Namespace) -> int:
    """Write the page; returns 0."""
    _write_page(options.files, options.out, options.chart)
    return 0


def _write_page(files: Sequence[Path], out: Path, chart: Path | None) -> None:
    from benchmarks.campaign import write_page

    if not write_page(files, out, chart) and chart is not None:
        _say("no chart: nothing measured with these sources has both a trimtab contestant and a limit")


def _measure(task: Task, options: argparse.Namespace) -> Record:
    from benchmarks.race import Pace
    from benchmarks.task import run_task

    pace = Pace(turns=options.turns, seconds=options.seconds, patience=options.patience)
    mallocs = ["default", "tuned"] if options.malloc == "both" else [options.malloc]
    return run_task(task, mallocs, pace, command=_recorded(options.arguments), say=_say)


def _recorded(arguments: Sequence[str]) -> str:
    """The command as a page shows it: without the options that say where files go, which are one machine's paths."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        option = argument.partition("=")[0]
        if skip:
            skip = False
        elif len(option) > 2 and any(place.startswith(option) for place in PLACES):
            skip = option == argument
        else:
            kept.append(argument)
    return f"python -m benchmarks {shlex.join(kept)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(record: Record, markdown: bool) -> None:
    from benchmarks.table import as_markdown, as_text, contestants_table, memory_table, title

    form: Callable[[Sequence[str], Any], str] = as_markdown if markdown else as_text
    print(f"\n{title(record)}\n\n{form(*contestants_table(record))}", flush=True)
    if record.memory:
        print(f"\nbeyond parameters and inputs, peak of forward+backward\n\n{form(*memory_table(record))}", flush=True)
    average, cores = record.machine["load_average"][0], record.machine["cores"]
    if average > cores + 0.5:
        _say(f"the machine was in use before this began: load average {average:.1f} on {cores} cores")


def _code(records: Sequence[Record]) -> int:
    entries = [entry for record in records for race in record.races for entry in race.entries]
    return int(any(entry.failed is not None for entry in entries if entry.role == "ours"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = build_parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    return exit_code(lambda: options.run(options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
