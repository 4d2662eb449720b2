"""`python -m trimtab.bench.gpu --out docs`: the layer, its GEMMs and its row moves on one CUDA device.

Prints a page, and writes it to docs/benchmarks-gpu.md, to which docs/benchmarks.md links; and prints the lines for
`trimtab.kernels.measured`. Under 8 minutes on an H200 by its number of rounds. The page is written after each shape; a
shape that fails is a line in it, and the others are measured.

Legend: D model dim, F expert hidden dim, E experts, K experts per token.
"""

from __future__ import annotations

import argparse
import gc
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from trimtab.bench.gpu_case import GpuCase, agree, captured, gemms, moves, our_layer, steps, their_layer
from trimtab.bench.gpu_race import Run, Timing, race
from trimtab.bench.page import GPU_PAGE
from trimtab.bench.table import as_markdown, duration, ratio, size
from trimtab.errors import InputError
from trimtab.kernels.measured import Measured

SHAPES = ((2048, 768, 128, 8), (4096, 1536, 128, 8), (4096, 14336, 8, 2))
TOKENS = 16384
NAMES = ("stock", "triton")


def layer_table(case: GpuCase, names: tuple[str, ...], *, rounds: int, peer: bool) -> tuple[str, dict[str, Timing]]:
    """(Markdown, timings of forward + backward by contestant): each set of kernels, its graph, and transformers."""
    layers = {f"trimtab {name}": our_layer(case, name) for name in names}
    layers |= {"transformers grouped_mm": their_layer(case, layers[f"trimtab {names[0]}"])} if peer else {}
    made = {name: steps(layer, case) for name, layer in layers.items()}
    wanted = made[f"trimtab {names[0]}"][1]()
    for name, (_, both) in made.items():
        agree(both(), wanted, name)
    runs: dict[str, dict[str, Run]] = {"forward": {}, "forward+backward": {}}
    for name, (forward, both) in made.items():
        runs["forward"][name], runs["forward+backward"][name] = forward, both
        if name.startswith("trimtab") and case.device.type == "cuda":
            runs["forward+backward"][f"{name}, CUDA graph"] = captured(both, case.device)
    rows, timings = [], {}
    for mode, contestants in runs.items():
        timings = race(contestants, case.device, rounds=rounds)
        reference = timings[list(made)[-1]].median
        flops = case.forward_flops * (1 if mode == "forward" else 3)
        for name, t in timings.items():
            rows.append([mode, name, duration(t.median), t.spread, f"{flops / t.median / 1e12:.1f}",
                         ratio(reference / t.median), _memory(t)])  # fmt: skip
    header = ["", "who", "median", "middle half", "TFLOP/s", f"against {list(made)[-1]}", "memory"]
    return as_markdown(header, rows), timings


def _memory(t: Timing) -> str:
    if t.memory is None:
        return "not measured"
    return f"{size(t.memory)}, {'pool of the graph' if t.is_graph else 'peak'}"


def gemm_table(case: GpuCase, names: tuple[str, ...], *, rounds: int) -> str:
    """The first grouped GEMM beside a dense product of the same FLOPs."""
    timings = race(gemms(case, names), case.device, rounds=rounds)
    flops = 4.0 * case.rows * case.dim * case.hidden
    dense = timings["dense"].median
    rows = [[name, duration(t.median), t.spread, f"{flops / t.median / 1e12:.1f}", ratio(dense / t.median)]
            for name, t in timings.items()]  # fmt: skip
    return as_markdown(["grouped GEMM, forward", "median", "middle half", "TFLOP/s", "of dense"], rows)


def move_table(case: GpuCase, names: tuple[str, ...], *, rounds: int) -> str:
    """Gather and combine beside a copy."""
    made = moves(case, names)
    timings = race({name: run for name, (run, _) in made.items()}, case.device, rounds=rounds)
    speed = {name: made[name][1] / t.median for name, t in timings.items()}
    rows = [[name, duration(t.median), t.spread, f"{speed[name] / 1e9:.0f}", ratio(speed[name] / speed["copy"])]
            for name, t in timings.items()]  # fmt: skip
    return as_markdown(["rows", "median", "middle half", "GB/s", "of copy"], rows)


def heading(case: GpuCase) -> str:
    """What a section of the page is about."""
    return f"## D {case.dim}, F {case.hidden}, E {case.experts}, K {case.top_k}: {case.tokens:,} tokens, {case.dtype}"


def report(case: GpuCase, names: tuple[str, ...] = NAMES, *, rounds: int = 11, peer: bool = True) -> tuple[str, str]:
    """(section of the page, line for the table of measured kernels) for one shape; the line is empty on the CPU."""
    layer, timings = layer_table(case, names, rounds=rounds, peer=peer)
    gc.collect()
    parts = [
        heading(case), layer, gemm_table(case, names, rounds=rounds), move_table(case, names, rounds=rounds),
    ]  # fmt: skip
    line = ""
    if case.device.type == "cuda" and set(NAMES) <= set(names):
        ms = {name: round(timings[f"trimtab {name}"].median * 1e3, 3) for name in NAMES}
        line = repr(
            Measured(
                device=torch.cuda.get_device_name(case.device),
                dim=case.dim,
                hidden=case.hidden,
                experts=case.experts,
                top_k=case.top_k,
                tokens=case.tokens,
                stock_ms=ms["stock"],
                triton_ms=ms["triton"],
            )
        )
    return "\n\n".join(parts), line


def attempt(case: GpuCase, *, rounds: int) -> tuple[str, str | None]:
    """`report`; where it fails, a section that says so and no line."""
    try:
        gc.collect()
        torch.cuda.empty_cache()
        return report(case, rounds=rounds)
    except Exception as error:  # whatever a device throws, what was measured before stays
        traceback.print_exc()
        what = textwrap.shorten(f"{type(error).__name__}: {error}".replace("`", "'"), 400)
        return f"{heading(case)}\n\nNot measured, it failed: `{what}`", None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page and write it to --out. Exit code 1 where there is no CUDA device, or where a shape failed."""
    parser = argparse.ArgumentParser(prog="python -m trimtab.bench.gpu", description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N")
    parser.add_argument("--rounds", type=int, default=11, metavar="N")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"for {GPU_PAGE}")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("trimtab.bench.gpu needs a CUDA device; nothing was measured", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    command = f"python -m trimtab.bench.gpu --tokens {given.tokens} --rounds {given.rounds}"
    title = f"# Benchmarks on one {torch.cuda.get_device_name(device)}, torch {torch.__version__}: `{command}`"
    print(f"{title}\n")
    sections, lines = [title], []
    for dim, hidden, experts, top_k in SHAPES:
        case = GpuCase(dim=dim, hidden=hidden, experts=experts, top_k=top_k, tokens=given.tokens, device=device)
        section, line = attempt(case, rounds=given.rounds)
        print(f"{section}\n", flush=True)
        sections.append(section)
        lines.append(line)
        if given.out is not None:
            write_gpu_page(sections, given.out)
    if given.out is not None:
        print(f"page: {given.out / GPU_PAGE}\n")
    print("For TABLE in src/trimtab/kernels/measured.py:\n")
    print("\n".join(f"    {line}," for line in lines if line is not None))
    return 1 if None in lines else 0


def write_gpu_page(sections: Sequence[str], folder: Path) -> Path:
    """The page's file, with a link back to the page of the CPU. Raises InputError where it cannot be written."""
    page, back = folder / GPU_PAGE, "What was measured on a CPU is in [benchmarks.md](benchmarks.md)."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text("\n\n".join([sections[0], back, *sections[1:]]) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{page}: cannot be written ({error.strerror})") from error
    return page


if __name__ == "__main__":
    sys.exit(main())
