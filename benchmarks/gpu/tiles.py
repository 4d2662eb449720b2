"""Each of Triton's GEMM launches alone, in other tiles than those that ship. What it writes must be the same.

Legend: T tokens, K experts per token, D model dim, F expert hidden dim, E experts, R = T * K rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.child import Measuring
from benchmarks.gpu.layers import cases
from benchmarks.layer_case import LayerCase, LayerData, expert_weights

CANDIDATES = tuple(
    dict(zip(("m", "n", "k", "warps", "stages", "per_sm"), values, strict=True))
    for values in (
        (128, 256, 64, 8, 3, 1), (128, 128, 64, 8, 4, 1), (128, 128, 64, 4, 3, 2), (64, 256, 64, 4, 3, 1),
        (128, 256, 64, 8, 4, 1), (64, 128, 64, 4, 4, 2), (128, 128, 128, 8, 2, 1), (128, 256, 32, 8, 5, 1),
    )
)  # fmt: skip
BOUND = 2e-2
"""Largest difference relative to the largest value: another order of sums rounds otherwise."""


def measure(run: Measuring) -> str:
    """Of each launch and candidate: milliseconds and TFLOP/s, or why not."""
    if not run.on_cuda:  # interpreted, to see that the launches are called as they want to be
        os.environ["TRITON_INTERPRET"] = "1"
    from trimtab.kernels.triton.language import Gemms, Launch, Tiles, on

    case = cases(run.device)[1 if run.on_cuda else 0][1]
    if run.on_cuda:
        gemms, candidates = on(torch.device("cuda", torch.cuda.current_device()))[0], [Tiles(**c) for c in CANDIDATES]
        shipped = Launch(gemms=gemms)
    else:
        small = Tiles(m=32, n=64, k=64, warps=1, stages=1)
        gemms, candidates = Gemms(**{f.name: small for f in fields(Gemms)}), [replace(small, m=16)]
        shipped = Launch(programs=2, wide=True, gemms=gemms)
    rows: list[dict[str, Any]] = []
    for name, (field, flops, step) in launches(case).items():
        own = getattr(gemms, field)
        wanted = [t.clone() for t in step(shipped)]  # a launch writes where the one before it did
        for tiles in (own, *(t for t in candidates if t != own)):
            if run.left() <= 0:
                break
            launch = replace(shipped, gemms=replace(gemms, **{field: tiles}))
            words = f"{tiles.m}x{tiles.n}x{tiles.k}, {tiles.warps} warps, {tiles.stages} stages, {tiles.per_sm} per SM"
            row: dict[str, Any] = {"launch": name, "tiles": words, "ships": tiles == own}
            try:
                for t in step(shipped):
                    t.fill_(torch.nan)  # these tiles write to the same memory
                off = [
                    float((a - b).abs().max() / b.abs().max().clamp(min=1e-9))
                    for a, b in zip(step(launch), wanted, strict=True)
                ]
                if not all(one <= BOUND for one in off):
                    row["failed"] = f"wrong numbers: off by {', '.join(f'{one:.1e}' for one in off)}"
                else:
                    row["ms"] = run.turns({"": lambda step=step, launch=launch: step(launch)}, turns=3)[""]
                    row["teraflops"] = flops / row["ms"] / 1e9
            except Exception as error:  # tiles that do not fit
                row["failed"] = type(error).__name__
            rows.append(row)
            print(row, flush=True)
            run.save(rows=rows, tokens=case.tokens)
    timed = sorted((row for row in rows if "ms" in row), key=lambda row: row["ms"], reverse=True)
    best = {row["launch"]: row for row in timed}  # the last of each is the fastest
    better = [f"{name} in {row['tiles']}" for name, row in best.items() if not row["ships"]]
    return f"{len(rows)} tried; faster than what ships: {'; '.join(better) or 'none'}"


def launches(case: LayerCase) -> dict[str, tuple[str, int, Callable[[Any], tuple[Tensor, ...]]]]:
    """Name -> (its tiles in `Gemms`, FLOPs, one launch, which gives what it wrote)."""
    from trimtab.kernels.triton import products, swiglu
    from trimtab.kernels.triton.moves import place_slots

    data, (up_EID, down_EDF) = LayerData.of(case, 0), expert_weights(case)
    x_TD, dy_TD, dtype = data.x_TD.detach(), data.dy_TD, torch.bfloat16 if case.device == "cuda" else torch.float16
    x_TD, dy_TD, up_EID, down_EDF = (t.to(dtype) for t in (x_TD, dy_TD, up_EID, down_EDF))
    plan = place_slots(data.ids_TK, case.num_experts)
    row_R, offsets = plan.row_R, plan.offsets_e
    rows, width = row_R.shape[0], case.hidden
    g = torch.Generator(case.device).manual_seed(0)
    pre_RI, h_RF = (torch.randn(rows, n, generator=g, device=case.device).to(dtype) for n in (2 * width, width))
    w_R = torch.rand(rows, generator=g, device=case.device)
    out_RD, d_up, d_down = x_TD.new_empty(rows, case.dim), torch.empty_like(up_EID), torch.empty_like(down_EDF)

    def gate_up(launch: Any) -> tuple[Tensor, ...]:
        pre, h = torch.empty_like(pre_RI), torch.empty_like(h_RF)
        swiglu.gate_up(x_TD, row_R, up_EID, offsets, pre, h, launch)
        return pre, h

    def down(launch: Any) -> tuple[Tensor, ...]:
        return (products.grouped_rows(h_RF, down_EDF.transpose(1, 2), offsets, out_RD, launch, scale_R=w_R),)

    def dx(launch: Any) -> tuple[Tensor, ...]:
        return (products.grouped_rows(pre_RI, up_EID, offsets, out_RD, launch),)

    def dh(launch: Any) -> tuple[Tensor, ...]:
        d_pre, hw, dots = swiglu.hidden_grad(dy_TD, row_R, down_EDF, w_R, offsets, pre_RI, launch)
        return d_pre, hw, dots.sum(1)

    def weight_grad(a: Tensor, b: Tensor, out: Tensor, launch: Any, **index: Tensor) -> tuple[Tensor, ...]:
        products.weight_grad(a, b, offsets, out.transpose(1, 2), launch, **index)
        return (out,)

    one = 2 * rows * case.dim * width
    return {
        "gate_up": ("gate_up", 2 * one, gate_up),
        "down": ("rows", one, down),
        "dh": ("dh", one, dh),
        "dx": ("across", 2 * one, dx),
        "d down": ("wgrad_gathered", one, lambda on: weight_grad(h_RF, dy_TD, d_down, on, b_index_R=row_R)),
        "d up": ("wgrad_gathered", 2 * one, lambda on: weight_grad(x_TD, pre_RI, d_up, on, a_index_R=row_R)),
    }
