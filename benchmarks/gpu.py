"""`python -m benchmarks.gpu --out docs`: the layer, its GEMMs and its row moves on one CUDA device.

Prints a page, and writes it to docs/benchmarks-gpu.md, to which docs/benchmarks.md links; and prints the lines for
`trimtab.kernels.measured`. Under 8 minutes on an H200 by its number of rounds. Each shape has processes of its own, for
a device that has failed once answers nothing more in that process, and a limit of time; the page is written after each.
Where the first of them did not come to its end, another measures all contestants but Triton's.

Legend: D model dim, F expert hidden dim, E experts, K experts per token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import store
from benchmarks.gpu_case import GpuCase
from benchmarks.gpu_tables import NAMES, Section, heading, report
from benchmarks.page import GPU_PAGE
from trimtab.whole_files import write_whole

SHAPES = ((2048, 768, 128, 8), (4096, 1536, 128, 8), (4096, 14336, 8, 2))
TOKENS = 16384
LIMIT = 150.0
TRITON = "triton"
TRIES = 3
"""Processes in a row that may end before they have measured anything."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page and write it to --out. Exit code 1 where there is no CUDA device, or where anything failed."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.rounds < 2 or options.tokens < 1 or not 0 < options.limit < math.inf:
        parser.error("--rounds must be at least 2, --tokens at least 1, --limit more than 0, and a number")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device; nothing was measured", file=sys.stderr)
        return 1
    if options.into is not None:
        return _measure(options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    command = shlex.join(["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)])
    title = f"# Benchmarks on one {where}, torch {torch.__version__}: `{command}`"
    print(f"{title}\n", flush=True)
    sections = [title]
    measured = list[Section]()
    for shape in options.shape or SHAPES:
        measured.append(apart(options, shape))
        sections.append(measured[-1].text)
        if options.out is not None:
            write_gpu_page(sections, options.out)
    if options.out is not None:
        print(f"page: {options.out / GPU_PAGE}\n")
    print("For TABLE in src/trimtab/kernels/measured.py:\n")
    print("\n".join(f"    {section.line}," for section in measured if section.line))
    for section in measured:
        if section.failed:
            print(f"Failed, {section.parts[0].removeprefix('## ')}: {'; '.join(dict.fromkeys(section.failed))}")
    return int(any(section.failed for section in measured))


def _parser() -> argparse.ArgumentParser:
    def shape(text: str) -> tuple[int, ...]:
        sizes = tuple(map(int, text.split(",")))
        if len(sizes) != 4 or min(sizes) < 1:
            raise ValueError
        return sizes

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=TOKENS, metavar="N")
    add("--rounds", type=int, default=11, metavar="N")
    add("--shape", type=shape, action="append", metavar="D,F,E,K", help="instead of the three; may be given again")
    add("--limit", type=float, default=LIMIT, metavar="S", help=f"seconds for a shape (default {LIMIT:.0f})")
    add("--out", type=Path, metavar="DIR", help=f"for {GPU_PAGE}")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to see that it runs")
    add("--kernels", nargs="+", default=NAMES, metavar="NAME", help=f"default {' '.join(NAMES)}")
    add("--into", type=Path, help=argparse.SUPPRESS)  # what a process of its own is started with
    add("--launches", type=int, help=argparse.SUPPRESS)  # and one for the Triton layer's launches, from this one on
    return parser


def _case(options: argparse.Namespace, shape: Sequence[int]) -> GpuCase:
    dim, hidden, experts, top_k = shape
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return GpuCase(dim=dim, hidden=hidden, experts=experts, top_k=top_k, tokens=options.tokens, device=device)


def apart(options: argparse.Namespace, shape: Sequence[int]) -> Section:
    """One shape, in processes of its own: what they had measured when they ended, or their time did.

    Where Triton breaks the device, or hangs, the others are measured again without it. The launches of its layer come
    last, in a process that ends where one of them breaks the device, and in another from behind that one on.
    """
    over = time.monotonic() + options.limit
    others = [name for name in options.kernels if name != TRITON]
    if len(others) == len(options.kernels):
        return _process(options, shape, options.kernels, options.limit)
    section = _process(options, shape, options.kernels, options.limit * 2 / 3)
    if others and not section.whole:
        section.add("Again, without Triton:", _process(options, shape, others, options.limit / 3))
    title, first, idle = "The launches of the Triton layer, one by one:", 0, 0
    while idle < TRIES and (left := over - time.monotonic()) > 0:
        launches = _process(options, shape, [TRITON], left, "--launches", first)
        section.add(title, launches)
        # A race that breaks the device is told and counted; one that ends its process is neither.
        lost = 0 if launches.broken and launches.launches else 1
        if launches.whole or (launches.launches and launches.behind <= lost):
            return section
        idle = 0 if launches.launches else idle + 1
        first, title = first + launches.launches + lost, "The launches behind that one:"
    section.parts.append("No more launches were measured.")
    section.failed.append("launches")
    return section


def _process(
    options: argparse.Namespace, shape: Sequence[int], kernels: Sequence[str], limit: float, *more: object
) -> Section:  # fmt: skip
    """What one process measured of a shape within `limit` seconds; the last part says why where that is not all."""
    said = ["--tokens", options.tokens, "--rounds", options.rounds, "--device", options.device]
    said += ["--kernels", *kernels, "--shape", ",".join(map(str, shape)), *more]
    with tempfile.TemporaryDirectory(prefix="trimtab-") as folder:
        into = Path(folder) / "section.json"
        command = [sys.executable, "-m", "benchmarks.gpu", *map(str, said), "--into", str(into)]
        end = _ended(command, limit)
        section = Section(**json.loads(into.read_text(encoding="utf-8"))) if into.exists() else Section([])
    if not section.whole:
        end = "the device answered nothing more" if section.broken else end
        section.parts = section.parts or [heading(_case(options, shape))]
        section.parts.append(f"The rest was not measured: {end}.")
        section.failed.append(end)
        print(f"{section.parts[-1]}\n", flush=True)
    return section


def _ended(command: Sequence[str], limit: float) -> str:
    """How the process ended, within `limit` seconds and a few more."""
    process = subprocess.Popen(command)
    try:
        return f"its process ended with {process.wait(limit)}"
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
            process.wait(10)
        return f"it was stopped after {limit:.0f} s"


def _measure(options: argparse.Namespace) -> int:
    def write(section: Section) -> None:
        write_whole(options.into, json.dumps(vars(section)))

    def keep(section: Section, part: str) -> None:
        write(section)
        print(f"{part}\n", flush=True)

    case, names = _case(options, options.shape[0]), tuple(options.kernels)
    section = report(case, names, rounds=options.rounds, launches=options.launches, done=keep)
    write(section)
    return int(bool(section.failed))


def write_gpu_page(sections: Sequence[str], folder: Path) -> Path:
    """The page's file, with a link back to the page of the CPU. Raises InputError where it cannot be written."""
    page, back = folder / GPU_PAGE, "What was measured on a CPU is in [benchmarks.md](benchmarks.md)."
    store.write(page, "\n\n".join([sections[0], back, *sections[1:]]) + "\n")
    return page


if __name__ == "__main__":
    sys.exit(main())
