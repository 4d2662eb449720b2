"""What a GPU's page says of one shape: the layer, the launches of its Triton kernels, a grouped GEMM, row moves.

Whoever fails is a row that says why; the others are measured. A table that fails is a line. A device that answers
nothing more ends it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_case import GpuCase, agree, answers, captured, gemms, moves, our_layer, steps, their_layer
from benchmarks.gpu_race import Raced, Run, Timing, race, told
from benchmarks.subject import BOTH, FORWARD
from benchmarks.table import as_markdown, duration, ratio, size
from trimtab.kernels.measured import Measured

NAMES = ("stock", "triton")
PEER = "transformers grouped_mm"
GRAPH = "CUDA graph"


@dataclass
class Section:
    """A shape's part of the page, as far as it was measured; whole: to its end. line: for the table of measured
    kernels. failed: who could not be measured. launches: how many were raced; behind: how many there are behind those.
    broken: its device answers nothing more.
    """

    parts: list[str]
    line: str = ""
    failed: list[str] = field(default_factory=list)
    whole: bool = False
    launches: int = 0
    behind: int = 0
    broken: bool = False

    def add(self, title: str, more: Section) -> None:
        """What another process measured of the same shape, under `title`."""
        self.parts += [title, *more.parts[1:]]
        self.failed += more.failed

    @property
    def text(self) -> str:
        return "\n\n".join(self.parts)


def heading(case: GpuCase) -> str:
    """What a section of the page is about."""
    return f"## D {case.dim}, F {case.hidden}, E {case.experts}, K {case.top_k}: {case.tokens:,} tokens, {case.dtype}"


def report(
    case: GpuCase, names: tuple[str, ...] = NAMES, *, rounds: int = 11, peer: bool = True, launches: int | None = None,
    done: Callable[[Section, str], None] = lambda section, part: None,
) -> Section:  # fmt: skip
    """The section of one shape. done: told of it, and of its newest part, after each. No line on the CPU.

    launches: instead of the tables those of the Triton layer's launches, from this number on.
    """
    section = Section([heading(case)])
    done(section, section.parts[0])
    tables: dict[str, Callable[[Section], Iterator[str]]] = {
        "layer": partial(layer_tables, case, names, rounds=rounds, peer=peer),
        "grouped GEMM": partial(gemm_table, case, names, rounds=rounds),
        "row moves": partial(move_table, case, names, rounds=rounds),
    }
    if launches is not None:
        tables = {"launches": partial(launch_tables, case, first=launches, rounds=rounds)}
    for name, table in tables.items():
        for part in _parts(name, table, section, case.device):
            section.parts.append(part)
            section.broken = not answers(case.device)
            done(section, part)
            if section.broken:
                return section
    section.whole = True
    return section


def _parts(
    name: str, table: Callable[[Section], Iterator[str]], section: Section, device: torch.device
) -> Iterator[str]:  # fmt: skip
    try:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield from table(section)
    except Exception as error:  # whatever a device throws, what was measured before stays
        section.failed.append(name)
        yield f"{name}: not measured, it failed: `{told(error)}`"


def layer_tables(
    case: GpuCase, names: tuple[str, ...], section: Section, *, rounds: int, peer: bool
) -> Iterator[str]:  # fmt: skip
    """Each set of kernels, transformers, and their CUDA graphs; all must agree with the first that runs."""
    runs, failed = _layer_runs(case, names, peer)
    against = PEER if peer else f"trimtab {names[-1]}"
    header = ["", "who", "median", "middle half", "TFLOP/s", f"against {against}", "memory"]
    for mode, contestants in runs.items():
        raced = race(contestants, case.device, rounds=rounds)
        failed |= raced.failed
        reference = _median(raced, against)
        flops = case.forward_flops * (1 if mode == "forward" else 3)
        rows = [[mode, name, duration(t.median), t.spread, f"{flops / t.median / 1e12:.1f}",
                 ratio(reference and reference / t.median), _memory(t)]
                for name, t in raced.timings.items()]  # fmt: skip
        rows += [["", name, "failed", "", "", "", why] for name, why in failed.items()]
        section.failed += [name for name in failed if name != f"{PEER}, {GRAPH}"]  # which transformers does not promise
        section.line = _line(case, raced.timings) if mode == BOTH else ""
        yield as_markdown(header, rows)
        failed = {}


def _median(raced: Raced, name: str) -> float | None:
    return raced.timings[name].median if name in raced.timings else None


def _layer_runs(
    case: GpuCase, names: tuple[str, ...], peer: bool
) -> tuple[dict[str, dict[str, Run]], dict[str, str]]:  # fmt: skip
    first = our_layer(case, names[0])
    makers: dict[str, Callable[[], Any]] = {f"trimtab {n}": partial(our_layer, case, n, first) for n in names}
    makers |= {PEER: partial(their_layer, case, first)} if peer else {}
    runs: dict[str, dict[str, Run]] = {FORWARD: {}, BOTH: {}}
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
            failed[name] = told(error)
            continue
        runs[FORWARD][name] = forward
        runs[BOTH][name] = both
        if case.device.type == "cuda":
            try:
                runs[BOTH][f"{name}, {GRAPH}"] = captured(both, case.device)
            except Exception as error:
                failed[f"{name}, {GRAPH}"] = told(error)
    return runs, failed


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


def gemm_table(case: GpuCase, names: tuple[str, ...], section: Section, *, rounds: int) -> Iterator[str]:
    """A grouped GEMM of the first one's shape beside a dense product of the same FLOPs."""
    raced = race(gemms(case, names), case.device, rounds=rounds)
    flops, dense = case.first_flops, _median(raced, "dense")
    rows = [[name, duration(t.median), t.spread, f"{flops / t.median / 1e12:.1f}", ratio(dense and dense / t.median)]
            for name, t in raced.timings.items()]  # fmt: skip
    header = ["grouped GEMM, [R, D] by [D, 2F]", "median", "middle half", "TFLOP/s", "of dense"]
    yield _with_failed(header, rows, raced, section)


def move_table(case: GpuCase, names: tuple[str, ...], section: Section, *, rounds: int) -> Iterator[str]:
    """Gather and combine beside a copy."""
    made = moves(case, names)
    raced = race({name: run for name, (run, _) in made.items()}, case.device, rounds=rounds)
    speed = {name: made[name][1] / t.median for name, t in raced.timings.items()}
    copy = speed.get("copy")
    rows = [[name, duration(t.median), t.spread, f"{speed[name] / 1e9:.0f}", ratio(copy and speed[name] / copy)]
            for name, t in raced.timings.items()]  # fmt: skip
    yield _with_failed(["rows", "median", "middle half", "GB/s", "of copy"], rows, raced, section)


def launch_tables(
    case: GpuCase, section: Section, *, rounds: int, first: int = 0, launch: Any = None
) -> Iterator[str]:  # fmt: skip
    """The launches of the Triton layer one by one, with their own tiles first, beside a dense product.

    first: the number of the launch to begin with. launch: a `trimtab.kernels.triton.language.Launch`, the layer's own
    by default.
    """
    from benchmarks.gpu_launches import layer_launches
    from trimtab.kernels.triton.language import Launch

    dense = gemms(case, ())["dense"]
    launches = layer_launches(case)
    for number, each in enumerate(launches[first:], first + 1):
        raced = race({"dense": dense, **each.runs(launch or Launch())}, case.device, rounds=rounds)
        tiles = {name: t for name, t in raced.timings.items() if name != "dense"}
        limit, rows = _median(raced, "dense"), list[list[str]]()
        for name, t in raced.timings.items():
            flops = each.flops if name in tiles else case.first_flops
            part = limit and flops * limit / case.first_flops / t.median
            counted = [f"{flops / t.median / 1e12:.1f}", ratio(part)] if flops else ["", ""]
            rows.append([name, duration(t.median), t.spread, *counted])
        section.launches, section.behind = section.launches + 1, len(launches) - number
        table = _with_failed([each.name, "median", "middle half", "TFLOP/s", "of dense"], rows, raced, section)
        best = min(tiles, key=lambda name: tiles[name].median, default="")
        yield f"{table}\n\nFastest tile, m x n x k: {best}." if best else table


def _with_failed(header: list[str], rows: list[list[str]], raced: Raced, section: Section) -> str:
    section.failed += raced.failed
    return as_markdown(header, rows + [[name, "failed", "", "", why] for name, why in raced.failed.items()])
