"""`python -m benchmarks`: speed beside peers and the limit, in one run; the pages that show it."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    adapters,
    frozen,
    frozen_step,
    imbalance,
    loading,
    megatron,
    optimizer,
    overhead,
    quantized,
    replay,
    replica_model,
    replica_plan,
    step,
)
from benchmarks.campaign import Campaign
from benchmarks.exchange import DIRECT, exchange_task
from benchmarks.gpu.run import code_of, run_stages
from benchmarks.gpu.stages import STAGES
from benchmarks.imbalance import UNEVEN, imbalance_table, imbalance_task
from benchmarks.layer import BACKENDS, layer_task
from benchmarks.layer_case import AUTOCAST, DTYPES, parse_shape
from benchmarks.machine import cores
from benchmarks.page import Table, campaign_page, record_page, report_page
from benchmarks.race import Pace
from benchmarks.result import Record
from benchmarks.subject import BOTH, FORWARD
from benchmarks.table import as_text, case_words, contestants_table, memory_table
from benchmarks.task import Task, read_record, run_task, write, write_record
from benchmarks.workloads import WORKLOADS
from trimtab.cli.main import exit_code
from trimtab.dispatch.options import COPY_COST, Replication
from trimtab.errors import ConfigError

RESULTS = Path("benchmarks/results")
DESCRIPTION = """\
Race trimtab against other implementations and against the limit of the machine. Every contestant lives in processes
of its own, is checked, warmed up, and takes turns with the others; with malloc as it comes and with a tuned one.
Run it from the root of the repository.

  python -m benchmarks step                      a whole training step in transformers; writes results/step.md
  python -m benchmarks overhead                  4 tokens: what the host does; writes results/overhead.md
  python -m benchmarks megatron                  a layer of Megatron-Core over 2 ranks; writes results/megatron.md
  python -m benchmarks quantized                 experts of codes beside bf16; writes results/quantized.md
  python -m benchmarks quantized --loading       memory held while a checkpoint of 2 GB is loaded to codes
  python -m benchmarks frozen                    frozen experts beside other projects' kernels; writes results/frozen.md
  python -m benchmarks adapters                  frozen experts with peft's adapters; writes results/adapters.md
  python -m benchmarks optimizer                 AdamW of stacks, Newton-Schulz; writes results/optimizer.md
  python -m benchmarks replay                    decisions recorded and told; writes results/replay.md
  python -m benchmarks imbalance                 replicated experts, however unevenly tokens fall, over 2 ranks
  python -m benchmarks replica_plan              planning the replicas of replicated experts, in ms
  python -m benchmarks replica_model             what replicas save, by a cost model over links and models
  python -m benchmarks layer --shape A --tokens 2048 --dtype bf16 --peers grouped_mm
  python -m benchmarks layer --ranks 2 --peers all_to_all --transports alltoall shared_memory
  python -m benchmarks layer --workloads balanced zipf hot
  python -m benchmarks layer --against ../old/src       the same layer of another checkout, in turns
  python -m benchmarks exchange --ranks 2 4 --tokens 8192 --peers all_to_all
  python -m benchmarks all                       layers and exchanges; goes on where it was stopped
  python -m benchmarks gpu --minutes 8           the first minutes on a GPU: is it right, how fast; writes runs/gpu

A contestant that cannot run is a line with its reason.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all parts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="WHAT")
    layer = _part(parts, "layer", "one experts layer, forward and forward+backward", _layer)
    exchange = _part(parts, "exchange", "dispatch and combine between ranks", _exchange)
    for add, dtypes, ranks in ((layer, (*DTYPES, AUTOCAST), 1), (exchange, tuple(DTYPES), 2)):
        add("--shape", nargs="+", default=["A"], metavar="D,F,E,K", help="or A, B, C: 512,256,64,8; 1024,512,32,4; …")
        add("--tokens", nargs="+", type=_positive, default=[2048], metavar="N", help="per rank (default 2048)")
        add("--dtype", nargs="+", default=["bf16"], choices=dtypes, help="autocast: parameters and tokens in fp32")
        add("--ranks", nargs="+", type=_positive, default=[ranks], metavar="N")
        add("--peers", nargs="+", default=[], metavar="NAME", help="who else races (default nobody)")
        add("--transports", nargs="+", default=list(DIRECT), choices=(*DIRECT, "allgather"))
        add("--workloads", nargs="+", default=["balanced"], choices=WORKLOADS)
    layer("--threads", nargs="+", type=_positive, default=[1], metavar="N", help="of each rank (default 1)")
    layer("--backends", nargs="+", default=["auto"], choices=tuple(BACKENDS), help="torch: no compiled C++")
    layer("--modes", nargs="+", default=[FORWARD, BOTH], choices=(FORWARD, BOTH))
    layer("--memory", action="store_true", help="measure peak memory as well")
    whole = _part(parts, "step", "a training step of a 3-layer Qwen3-MoE", _step, RESULTS / "step.md", malloc="default")
    whole("--dtype", default="bf16", choices=tuple(step.BOUNDS))
    whole("--threads", type=_positive, default=2, metavar="N")
    whole("--tiny", action="store_true", help="a tiny model, to see that it runs")
    whole("--muon", action="store_true", help="instead: trimtab's step with Muon beside its own with AdamW")
    few = _part(parts, "overhead", "host overhead at 4 tokens", _overhead, RESULTS / "overhead.md", malloc="default")
    for add in (layer, whole, few):
        add("--against", default="", metavar="SRC", help="race the trimtab of another checkout's src folder as well")
    mcore = _part(parts, "megatron", "a layer of Megatron-Core", _megatron, RESULTS / "megatron.md", malloc="default")
    mcore("--shape", nargs="+", default=["A", "B", "C"], metavar="D,F,E,K")
    mcore("--tokens", type=_positive, default=2048, metavar="N", help="per rank (default 2048)")
    mcore("--dtype", nargs="+", default=["bf16", "fp32"], choices=tuple(DTYPES))
    mcore("--transports", nargs="+", default=list(DIRECT), choices=(*DIRECT, "allgather"))
    codes = _part(parts, "quantized", "experts of codes", _quantized, RESULTS / "quantized.md", malloc="default")
    codes("--loading", action="store_true", help="instead: memory held while 2 GB are loaded to codes")
    still = _part(parts, "frozen", "frozen experts", _frozen, RESULTS / "frozen.md", malloc="default", seconds=45.0)
    still("--shape", default="2048,768,128,8", metavar="D,F,E,K", help="default 2048,768,128,8, Qwen3-30B's")
    still("--tokens", nargs="+", type=_positive, default=[1, 4, 16, 64, 256, 2048], metavar="N",
          help="from 2048 on with a quarter of the experts (default 1 4 16 64 256 2048)")  # fmt: skip
    still("--of", nargs="+", default=list(frozen.KINDS), choices=frozen.KINDS, metavar="KIND")
    still("--tiny", action="store_true", help="a step of a tiny model, to see that it runs")
    still("--threads", type=_positive, default=2, metavar="N")
    still("--merge", type=Path, metavar="DIR", help="race nobody: the page of what --json DIR wrote")
    lora = _part(parts, "adapters", "experts with adapters", _adapters, RESULTS / "adapters.md", malloc="default")
    stacks = _part(parts, "optimizer", "a stack's step", _optimizer, RESULTS / "optimizer.md", malloc="default")
    stacks("--adamw", type=parse_sizes, default=[64, 768, 1024], metavar="E,M,N")
    stacks("--newton-schulz", nargs="+", type=parse_sizes, default=[[16, 384, 1024], [4, 768, 2048]], metavar="E,M,N")
    stacks("--threads", type=_positive, default=1, metavar="N")
    told = _part(parts, "replay", "decisions recorded and told", _replay, RESULTS / "replay.md", malloc="default")
    for add, tokens, shapes in ((codes, [2048, 256], "ABC"), (lora, [2048], "ABC"), (told, [2048], "B")):
        add("--shape", nargs="+", default=list(shapes), metavar="D,F,E,K")
        add("--tokens", nargs="+", type=_positive, default=tokens, metavar="N")
        add("--dtype", default="bf16", choices=tuple(DTYPES))
        add("--threads", type=_positive, default=1, metavar="N")
    uneven = _part(
        parts, "imbalance", "replicated experts under uneven tokens", _imbalance, RESULTS / "imbalance.md",
        malloc="default", seconds=45.0, turns=7,
    )  # fmt: skip
    uneven("--shape", nargs="+", default=["C", "A", "B"], metavar="D,F,E,K")
    uneven("--tokens", type=_positive, default=2048, metavar="N", help="per rank (default 2048)")
    uneven("--dtype", nargs="+", default=["bf16"], choices=tuple(DTYPES))
    uneven("--transports", nargs="+", default=["shared_memory", "alltoall"], choices=DIRECT)
    uneven("--workloads", nargs="+", default=list(UNEVEN), choices=WORKLOADS)
    uneven(
        "--replicate-experts",
        nargs="+",
        type=_replication,
        default=["auto"],
        metavar="HOW",
        help="auto, or a tolerance: 0, 0.1",
    )
    uneven("--copy-cost", type=_positive, default=COPY_COST, metavar="SLOTS")
    device = parts.add_parser(
        "gpu", help="stages on a CUDA device: correctness, profile, speed; writes runs/gpu/gpu.md"
    )
    device.add_argument("--minutes", type=float, default=8.0, metavar="M", help="for all stages (default 8)")
    device.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default runs/gpu")
    device.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to see that it runs")
    device.add_argument(
        "--only", nargs="+", choices=[s.name for s in STAGES], metavar="STAGE", help="these stages alone"
    )
    for name, module in (("replica_plan", replica_plan), ("replica_model", replica_model)):
        part = parts.add_parser(name, help=f"writes results/{name}.md")
        part.add_argument("--out", type=Path, default=RESULTS / f"{name}.md", metavar="FILE.md")
        part.set_defaults(report=module.report)
    every = _part(parts, "all", "the page of layers and exchanges", None, RESULTS / "layers.md", seconds=4.0, turns=3)
    every(
        "--results", type=Path, default=Path("runs/bench"), metavar="DIR", help="a file per case (default runs/bench)"
    )
    every("--quick", action="store_true", help="a few small cases, to see that it all runs")
    every("--only", nargs="+", default=[], metavar="WORD", help="cases whose file name has all these words")
    every("--list", action="store_true", help="print the cases that are left, in their order, and stop")
    return parser


def _part(
    parts: Any,
    name: str,
    help: str,
    tasks: Any,
    out: Path | None = None,
    *,
    malloc: str = "both",
    seconds: float = 20.0,
    turns: int = 5,
) -> Any:
    part = parts.add_parser(name, help=help)
    add = part.add_argument
    add("--turns", type=int, default=turns, metavar="N", help=f"of every contestant, at least (default {turns})")
    add("--seconds", type=float, default=seconds, metavar="S", help=f"for all turns of a race (default {seconds:.0f})")
    add("--malloc", default=malloc, choices=("both", "default", "tuned"))
    add("--patience", type=float, default=600.0, metavar="S", help="give a silent contestant up after (default 600)")
    add("--json", type=Path, metavar="DIR", help="a file of raw times for each case")
    add("--out", type=Path, default=out, metavar="FILE.md", help=f"the page (default {out or 'none'})")
    part.set_defaults(tasks=tasks)
    return add


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def _replication(text: str) -> Replication:
    return text if text == "auto" else float(text)  # type: ignore[return-value]


def _layer(o: argparse.Namespace) -> list[Task]:
    if max(o.threads) > cores():
        raise ConfigError(f"--threads {max(o.threads)}: this process has {cores()} core(s)")
    return [
        layer_task(
            parse_shape(shape), tokens=tokens, dtype=dtype, threads=threads, ranks=ranks, workloads=o.workloads,
            backends=o.backends, transports=o.transports, peers=o.peers, modes=o.modes, memory=o.memory,
            against=o.against,
        )
        for shape, tokens, dtype, threads, ranks in product(o.shape, o.tokens, o.dtype, o.threads, o.ranks)
    ]  # fmt: skip


def _exchange(o: argparse.Namespace) -> list[Task]:
    return [
        exchange_task(
            parse_shape(shape), tokens=tokens, dtype=dtype, ranks=ranks, workload=workload, transports=o.transports,
            peers=o.peers,
        )
        for shape, tokens, dtype, ranks, workload in product(o.shape, o.tokens, o.dtype, o.ranks, o.workloads)
    ]  # fmt: skip


def _step(o: argparse.Namespace) -> list[Task]:
    given: Any = {"dtype": o.dtype, "threads": o.threads, "against": o.against, "muon": o.muon}
    return [step.step_task(**given, **step.sizes(o.tiny))]


def _overhead(o: argparse.Namespace) -> list[Task]:
    return [overhead.overhead_task(against=o.against)]


def _megatron(o: argparse.Namespace) -> list[Task]:
    return [
        megatron.megatron_task(parse_shape(shape), tokens=o.tokens, dtype=dtype, transports=o.transports)
        for shape, dtype in product(o.shape, o.dtype)
    ]


def _quantized(o: argparse.Namespace) -> list[Task]:
    return [
        quantized.quantized_task(parse_shape(shape), tokens=tokens, dtype=o.dtype, threads=o.threads)
        for shape, tokens in product(o.shape, o.tokens)
    ]


def _frozen(o: argparse.Namespace) -> list[Task]:
    shape, cases = parse_shape(o.shape), []
    for kind, many in product(o.of, (False, True)):
        if kind == "step":
            cases += [] if many else [frozen_step.adapters_step_task(threads=o.threads, **step.sizes(o.tiny))]
        elif tokens := [each for each in o.tokens if (each >= frozen.MANY) == many]:
            dim, hidden, experts, top_k = shape
            cut = (dim, hidden, experts // 4 if many else experts, top_k)
            cases.append(frozen.frozen_task(cut, tokens=tokens, kind=kind, threads=o.threads))
    return cases


def parse_sizes(text: str) -> list[int]:
    """E,M,N: sizes of a stack of experts."""
    return [_positive(word) for word in text.split(",")]


def _optimizer(o: argparse.Namespace) -> list[Task]:
    return [
        *(optimizer.adamw_task(o.adamw, dtype=dtype, threads=o.threads) for dtype in optimizer.DTYPES),
        *(optimizer.iteration_task(shape, threads=o.threads) for shape in o.newton_schulz),
    ]


def _adapters(o: argparse.Namespace) -> list[Task]:
    return [
        adapters.adapters_task(parse_shape(shape), tokens=tokens, dtype=o.dtype, threads=o.threads)
        for shape, tokens in product(o.shape, o.tokens)
    ]


def _replay(o: argparse.Namespace) -> list[Task]:
    return [
        replay.replay_task(parse_shape(shape), tokens=tokens, dtype=o.dtype, threads=o.threads)
        for shape, tokens in product(o.shape, o.tokens)
    ]


def _imbalance(o: argparse.Namespace) -> list[Task]:
    return [
        imbalance_task(
            parse_shape(shape), tokens=o.tokens, dtype=dtype, workloads=o.workloads, transports=o.transports,
            ways=o.replicate_experts, copy_cost=o.copy_cost,
        )
        for shape, dtype in product(o.shape, o.dtype)
    ]  # fmt: skip


def run_gpu(options: argparse.Namespace) -> int:
    """The stages on a GPU; returns 1 where a test failed or numbers were wrong, 3 where a stage measured nothing."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the stages of gpu need a CUDA device; nothing was measured")
    if not 0 < options.minutes < math.inf:
        raise ConfigError("--minutes must be more than 0, and a number")
    chosen = [stage for stage in STAGES if options.only is None or stage.name in options.only]
    outcomes = run_stages(
        chosen, options.out.resolve(), options.device, 60 * options.minutes, say=partial(print, flush=True)
    )
    print(f"page: {options.out / 'gpu.md'}")
    return code_of(outcomes)


TABLES: dict[str, Table] = {"imbalance": imbalance_table, "frozen": frozen.frozen_table}
ABOUT = {
    part: module.__doc__
    for part, module in (
        ("step", step),
        ("overhead", overhead),
        ("megatron", megatron),
        ("quantized", quantized),
        ("adapters", adapters),
        ("frozen", frozen),
        ("optimizer", optimizer),
        ("replay", replay),
        ("imbalance", imbalance),
        ("replica_plan", replica_plan),
        ("replica_model", replica_model),
    )
}


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the page; returns 0 where every contestant of ours ran, else 1."""
    if getattr(options, "loading", False):
        print(loading.report())
        return 0
    if "report" in options:
        text = report_page(options.part, _about(ABOUT[options.part]), options.report())
        print(text)
        write(options.out, text)
        return 0
    if getattr(options, "merge", None):
        records = [read_record(file) for file in sorted(options.merge.glob("*.json"))]
        write(options.out, record_page(records, _about(ABOUT[options.part]), _table(records), _before(options.out)))
        return _code(records)
    records = []
    for task in options.tasks(options):
        records.append(_measure(task, options))
        _print(records[-1])
        if options.json is not None:
            write_record(records[-1], options.json / f"{task.key}.json")
        if options.out is not None:
            about, before = ABOUT.get(options.part), _before(options.out)
            made = record_page(records, _about(about), _table(records), before) if about else campaign_page(records)
            write(options.out, made)
            print(f"page: {options.out}")
    return _code(records)


def _before(page: Path) -> str:
    """What the page is now."""
    return page.read_text(encoding="utf-8") if page.exists() else ""


def _about(doc: str | None) -> str:
    """A module's docstring without its first words, which are the command, and without its legend."""
    assert doc is not None
    about = doc.partition(": ")[2].partition("\n\nLegend:")[0].strip()
    return about[0].upper() + about[1:]


def run_all(options: argparse.Namespace) -> int:
    """Measure what this revision has no results of, and write the page of all that it has; as `run`."""
    campaign = Campaign(options.results, quick=options.quick, only=options.only)
    left = campaign.left()
    if options.list:
        print("\n".join(map(str, left)))
        return 0
    records = []
    for record in campaign.run(lambda task: _measure(task, options)):
        records.append(record)
        _print(record)
        write(options.out, campaign_page(campaign.measured()))
        _say(f"{len(records)} of {len(left)} cases done, this one in {record.settings['took']:.0f} s")
    print(f"page: {options.out}")
    return _code(records)


def _measure(task: Task, options: argparse.Namespace) -> Record:
    pace = Pace(turns=options.turns, seconds=options.seconds, patience=options.patience)
    mallocs = ["default", "tuned"] if options.malloc == "both" else [options.malloc]
    return run_task(task, mallocs, pace, command=_command(options.arguments), say=_say)


def _command(arguments: Sequence[str]) -> str:
    """As a page shows it: without the options that are one machine's paths."""
    kept = list(arguments)
    for option in ("--out", "--results", "--json", "--against"):
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return f"python -m benchmarks {shlex.join(kept)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(record: Record) -> None:
    form: Callable[[Sequence[str], Any], str] = as_text
    print(f"\n{record.part}: {case_words(record)}\n\n{form(*_table([record])(record))}", flush=True)
    if record.memory:
        print(f"\nbeyond parameters and inputs, peak of forward+backward\n\n{form(*memory_table(record))}", flush=True)


def _table(records: Sequence[Record]) -> Table:
    return TABLES.get(records[0].part, contestants_table)


def _code(records: Sequence[Record]) -> int:
    entries = [entry for record in records for race in record.races for entry in race.entries]
    return int(any(entry.failed is not None for entry in entries if entry.role == "ours"))


RUNS = {"all": run_all, "gpu": run_gpu}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part and return its exit code: 2 for options that make no sense."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = build_parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    return exit_code(lambda: RUNS.get(options.part, run)(options))


if __name__ == "__main__":
    sys.exit(main())
