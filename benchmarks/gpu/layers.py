"""One experts layer on each backend and in transformers, with the same weights: each shape is in memory once.

Wrong numbers do not race: outputs and every gradient are compared with plain formulas in float32 first. A contestant
that breaks the device ends this process, and what was found before is kept; transformers' sonicmoe, loaded from
elsewhere, races last, beside the default.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.child import Measuring
from benchmarks.layer_builds import alone, qwen_experts
from benchmarks.layer_case import LayerCase, LayerData, expert_weights
from benchmarks.layer_step import layer_subject
from benchmarks.layer_truth import BOUNDS, compare, truth
from benchmarks.subject import BOTH, FORWARD, Subject
from trimtab.errors import first_line

SHAPES = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}
TOKENS = (4096, 32768)
TINY = {"tiny": (64, 32, 8, 2)}
FUSED, DEFAULT, STOCK = "triton", "grouped_mm+triton", "grouped_mm"
BACKENDS = {"cuda": (FUSED, DEFAULT, STOCK), "cpu": ("torch", STOCK)}
PEER, LATE = "transformers grouped_mm", "transformers sonicmoe"


def cases(device: str) -> list[tuple[str, LayerCase]]:
    """(name of the shape, the case), the most telling first."""
    shapes, tokens = (SHAPES, TOKENS) if device == "cuda" else (TINY, (16, 64))
    return [
        (name, LayerCase.shaped(shape, tokens=n, dtype="bf16", workload="random", device=device))
        for name, shape in shapes.items()
        for n in tokens
    ]


def contestant(name: str, case: LayerCase, data: LayerData, weights: tuple[Tensor, Tensor]) -> Subject:
    """name: "trimtab BACKEND" or "transformers IMPLEMENTATION"."""
    library, _, kind = name.partition(" ")
    layer, params = (alone if library == "trimtab" else qwen_experts)(case, kind, weights)
    return layer_subject(layer, case, 0, params, data)


def measure(run: Measuring) -> str:
    """Rows of (shape, tokens, contestant): milliseconds, TFLOP/s and peak bytes, or why not."""
    ours = [f"trimtab {backend}" for backend in BACKENDS[run.device]]
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for names, kept in (([*ours, PEER], [*ours, PEER]), ([*ours[:2], LATE], [LATE])):
        weights, drawn = None, ""
        for shape, case in cases(run.device):
            if run.left() <= 0:
                left_out.append(f"{shape} at {case.tokens} tokens")
                continue
            if drawn != shape:
                weights = None  # what the last shape held goes first
                weights, drawn = expert_weights(case), shape
            assert weights is not None
            found = [row for row in race(run, names, case, weights) if row["name"] in kept]
            rows += [{"shape": shape, "tokens": case.tokens, **row} for row in found]
            wrong = [f"{r['name']}, {r['shape']}: {r['failed']}" for r in rows if r.get("wrong") and r["name"] in ours]
            run.save(rows=rows, wrong=wrong, left_out=left_out)
    if not any("ms" in row for row in rows):
        raise RuntimeError("nothing was measured")
    good = sum("ms" in row for row in rows)
    return f"{good} of {len(rows)} rows measured" + (f"; no time for {', '.join(left_out)}" if left_out else "")


def race(
    run: Measuring, names: Sequence[str], case: LayerCase, weights: tuple[Tensor, Tensor], make: Any = contestant
) -> list[dict[str, Any]]:
    """A row for each, in turns."""
    data = LayerData.of(case, 0)
    true = truth(case, weights=weights)
    _give_back(run)
    rows: dict[str, dict[str, Any]] = {name: {"name": name} for name in names}
    racing: dict[str, Subject] = {}
    for name in names:
        try:
            made = make(name, case, data, weights)
            assert made.outcome is not None
            if (off := compare([made.outcome()], true, BOUNDS["bf16"])) is not None:
                rows[name] |= {"failed": f"wrong numbers, not raced: {off}", "wrong": True}
                continue
            rows[name]["peak"] = peak(run, made.modes[BOTH])
            racing[name] = made
        except Exception as error:  # whatever a peer raises; a device that is broken raises it for all others, too
            traceback.print_exc()
            rows[name] |= {
                "failed": first_line(error, typed=True)[:200], "wrong": not isinstance(error, torch.OutOfMemoryError),
            }  # fmt: skip
        finally:
            _give_back(run)
    flops = 6 * case.tokens * case.top_k * case.dim * case.hidden
    for mode, times in ((FORWARD, 1), (BOTH, 3)):
        for name, ms in run.turns({n: made.modes[mode] for n, made in racing.items()}).items():
            rows[name].setdefault("ms", {})[mode] = ms
            rows[name].setdefault("teraflops", {})[mode] = times * flops / ms / 1e9
    return list(rows.values())


def _give_back(run: Measuring) -> None:
    gc.collect()
    if run.on_cuda:
        torch.cuda.empty_cache()


def peak(run: Measuring, step: Callable[[], object]) -> int | None:
    """Bytes of the largest moment of a step beyond what was there: activations, and gradients of all."""
    if not run.on_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
