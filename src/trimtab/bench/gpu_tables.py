"""What a GPU's page says of one shape: the layer, the launches of its Triton kernels, a grouped GEMM, row moves.

Whoever fails is a row that says why; the others are measured. A table that fails is a line.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.bench.gpu_case import GpuCase, agree, captured, gemms, moves, our_layer, steps, their_layer
from trimtab.bench.gpu_race import Raced, Run, Timing, brief, race
from trimtab.bench.table import as_markdown, duration, ratio, size
from trimtab.kernels.measured import Measured

NAMES = ("stock", "triton")
PEER = "transformers grouped_mm"
GRAPH = "CUDA graph"
BOTH = "forward+backward"


@dataclass
class Section:
    """A shape's part of the page, as far as it was measured; whole: to its end. line: for the table of measured
    kernels. failed: who could not be measured."""

    parts: list[str]
    line: str = ""
    failed: list[str] = field(default_factory=list)
    whole: bool = False

    @property
    def text(self) -> str:
        return "\n\n".join(self.parts)


def heading(case: GpuCase) -> str:
    """What a section of the page is about."""
    return f"## D {case.dim}, F {case.hidden}, E {case.experts}, K {case.top_k}: {case.tokens:,} tokens, {case.dtype}"


def report(
    case: GpuCase, names: tuple[str, ...] = NAMES, *, rounds: int = 11, peer: bool = True,
    done: Callable[[Section, str], None] = lambda section, part: None,
) -> Section:  # fmt: skip
    """The section of one shape. done: told of it, and of its newest part, after each. No line on the CPU."""
    section = Section([heading(case)])
    done(section, section.parts[0])
    tables: dict[str, Callable[[Section], str]] = {
        "layer": partial(layer_table, case, names, rounds=rounds, peer=peer),
        "grouped GEMM": partial(gemm_table, case, names, rounds=rounds),
        "row moves": partial(move_table, case, names, rounds=rounds),
    }
    if "triton" in names:
        tables["launches"] = partial(launch_table, case, rounds=rounds)
    for name, table in tables.items():
        try:
            gc.collect()
            if case.device.type == "cuda":
                torch.cuda.empty_cache()
            part = table(section)
        except Exception as error:  # whatever a device throws, what was measured before stays
            traceback.print_exc()
            section.failed.append(name)
            part = f"{name}: not measured, it failed: `{brief(error)}`"
        section.parts.append(part)
        section.whole = name == list(tables)[-1]
        done(section, part)
    return section


def layer_table(case: GpuCase, names: tuple[str, ...], section: Section, *, rounds: int, peer: bool) -> str:
    """Each set of kernels, transformers, and their CUDA graphs; all must agree with the first that runs."""
    runs, failed = _layer_runs(case, names, peer)
    against, rows, timings = PEER if peer else f"trimtab {names[-1]}", list[list[str]](), dict[str, Timing]()
    for mode, contestants in runs.items():
        raced = race(contestants, case.device, rounds=rounds)
        timings, failed = raced.timings, failed | raced.failed
        reference = timings[against].median if against in timings else None
        flops = case.forward_flops * (1 if mode == "forward" else 3)
        for name, t in timings.items():
            rows.append([mode, name, duration(t.median), t.spread, f"{flops / t.median / 1e12:.1f}",
                         "" if reference is None else ratio(reference / t.median), _memory(t)])  # fmt: skip
    rows += [["", name, "failed", "", "", "", why] for name, why in failed.items()]
    section.failed += [name for name in failed if name != f"{PEER}, {GRAPH}"]  # which transformers does not promise
    section.line = _line(case, timings)
    header = ["", "who", "median", "middle half", "TFLOP/s", f"against {against}", "memory"]
    return as_markdown(header, rows)


def _layer_runs(
    case: GpuCase, names: tuple[str, ...], peer: bool
) -> tuple[dict[str, dict[str, Run]], dict[str, str]]:  # fmt: skip
    first = our_layer(case, names[0])
    makers: dict[str, Callable[[], Any]] = {f"trimtab {n}": partial(our_layer, case, n, first) for n in names}
    makers |= {PEER: partial(their_layer, case, first)} if peer else {}
    runs: dict[str, dict[str, Run]] = {"forward": {}, BOTH: {}}
    failed: dict[str, str] = {}
    wanted: list[Tensor] | None = None
    for name, make in makers.items():
        try:
            forward, both = steps(make(), case)
            found = both()
            if wanted is not None:
                agree(found, wanted, name)
            wanted = wanted or found
            del found  # gradients of all weights, in the way of what is captured next
        except Exception as error:
            failed[name] = _said(error)
            continue
        runs["forward"][name] = forward
        runs[BOTH][name] = both
        if case.device.type == "cuda":
            try:
                runs[BOTH][f"{name}, {GRAPH}"] = captured(both, case.device)
            except Exception as error:
                failed[f"{name}, {GRAPH}"] = _said(error)
    return runs, failed


def _said(error: Exception) -> str:
    traceback.print_exc()
    return brief(error)


def _memory(t: Timing) -> str:
    if t.memory is None:
        return "not measured"
    return f"{size(t.memory)}, {'pool of the graph' if t.is_graph else 'peak'}"


def _line(case: GpuCase, timings: Mapping[str, Timing]) -> str:
    if case.device.type != "cuda" or not {f"trimtab {name}" for name in NAMES} <= timings.keys():
        return ""
    ms = {name: round(timings[f"trimtab {name}"].median * 1e3, 3) for name in NAMES}
    return repr(
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


def gemm_table(case: GpuCase, names: tuple[str, ...], section: Section, *, rounds: int) -> str:
    """A grouped GEMM of the first one's shape beside a dense product of the same FLOPs."""
    raced = race(gemms(case, names), case.device, rounds=rounds)
    flops, dense = 4.0 * case.rows * case.dim * case.hidden, raced.timings["dense"].median
    rows = [[name, duration(t.median), t.spread, f"{flops / t.median / 1e12:.1f}", ratio(dense / t.median)]
            for name, t in raced.timings.items()]  # fmt: skip
    header = ["grouped GEMM, [R, D] by [D, 2F]", "median", "middle half", "TFLOP/s", "of dense"]
    return _with_failed(header, rows, raced, section)


def move_table(case: GpuCase, names: tuple[str, ...], section: Section, *, rounds: int) -> str:
    """Gather and combine beside a copy."""
    made = moves(case, names)
    raced = race({name: run for name, (run, _) in made.items()}, case.device, rounds=rounds)
    speed = {name: made[name][1] / t.median for name, t in raced.timings.items()}
    rows = [[name, duration(t.median), t.spread, f"{speed[name] / 1e9:.0f}", ratio(speed[name] / speed["copy"])]
            for name, t in raced.timings.items()]  # fmt: skip
    return _with_failed(["rows", "median", "middle half", "GB/s", "of copy"], rows, raced, section)


def launch_table(case: GpuCase, section: Section, *, rounds: int, launch: Any = None) -> str:
    """The launches of the Triton layer one by one, with their own tiles first; the fastest of each below.

    launch: a `trimtab.kernels.triton.language.Launch`, the layer's own by default.
    """
    from trimtab.bench.gpu_launches import layer_launches
    from trimtab.kernels.triton.language import Launch

    dense = race({"dense": gemms(case, ())["dense"]}, case.device, rounds=rounds).timings["dense"].median
    speed, rows, fastest = 4.0 * case.rows * case.dim * case.hidden / dense, list[list[str]](), list[str]()
    for each in layer_launches(case):
        raced = race(each.runs(launch or Launch()), case.device, rounds=rounds)
        for tile, t in raced.timings.items():
            tflops = f"{each.flops / t.median / 1e12:.1f}" if each.flops else ""
            of_dense = ratio(each.flops / t.median / speed) if each.flops else ""
            rows.append([each.name, tile, duration(t.median), t.spread, tflops, of_dense])
        rows += [[each.name, tile, "failed", "", "", why] for tile, why in raced.failed.items()]
        section.failed += [f"{each.name}, {tile}" for tile in raced.failed]
        if each.tiles is not None and raced.timings:
            fastest.append(f"{each.name}: {min((t.median, tile) for tile, t in raced.timings.items())[1]}")
    table = as_markdown(["launch", "tile, m x n x k", "median", "middle half", "TFLOP/s", "of dense"], rows)
    return f"{table}\n\nFastest tiles: {'; '.join(fastest)}."


def _with_failed(header: list[str], rows: list[list[str]], raced: Raced, section: Section) -> str:
    section.failed += raced.failed
    return as_markdown(header, rows + [[name, "failed", "", "", why] for name, why in raced.failed.items()])
