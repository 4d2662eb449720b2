"""Each GEMM of the Triton layer by itself, with the tiles that it has and with others that compile well for Hopper.

Legend: R expert rows, D model dim, I = 2F pre-activations, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_case import GpuCase
from benchmarks.gpu_race import Run
from trimtab.experts.mlp_triton import plan_on_device
from trimtab.kernels.triton.gate_up import gate_up
from trimtab.kernels.triton.hidden_grad import hidden_grad
from trimtab.kernels.triton.language import Launch, Tiles
from trimtab.kernels.triton.metadata import place_slots
from trimtab.kernels.triton.rows_gemm import grouped_rows
from trimtab.kernels.triton.weight_grad import weight_grad


def _tiles(m: int, n: int, k: int, *, stages: int) -> Tiles:
    return Tiles(m=m, n=n, k=k, warps=8, stages=stages)


def _two(m: int, n: int, k: int, *, stages: int) -> Tiles:
    """Half the warps each, two on a multiprocessor."""
    return Tiles(m=m, n=n, k=k, warps=4, stages=stages, per_sm=2)


OTHERS: dict[str, tuple[Tiles, ...]] = {
    "rows": (_tiles(128, 128, 64, stages=4), _tiles(128, 256, 32, stages=4), _two(128, 128, 64, stages=3)),
    "across": (_tiles(128, 256, 64, stages=3), _tiles(128, 128, 64, stages=4), _two(128, 128, 64, stages=3)),
    "gate_up": (_tiles(128, 128, 64, stages=4), _tiles(128, 128, 32, stages=4), _two(128, 64, 64, stages=3)),
    "dh": (_tiles(128, 256, 64, stages=3), _tiles(128, 128, 32, stages=5)),
    "wgrad": (_tiles(128, 128, 64, stages=4), _tiles(256, 128, 64, stages=3), _two(128, 128, 64, stages=3)),
    "wgrad_gathered": (_tiles(128, 128, 64, stages=7), _tiles(256, 128, 64, stages=5), _two(128, 128, 64, stages=5)),
}
"""By the name of the tiles in `Launch`: what else is worth a race on a device."""


@dataclass(frozen=True, kw_only=True)
class LaunchCase:
    """One launch of the layer. tiles: the field of `Launch` that it takes its tiles from; none for what is no GEMM."""

    name: str
    tiles: str | None
    flops: float
    run: Callable[[Launch], object]

    def runs(self, usual: Launch) -> dict[str, Run]:
        """By tile, that of `usual` first."""
        if self.tiles is None:
            return {"": partial(self.run, usual)}
        made: dict[str, Run] = {words(getattr(usual, self.tiles)): partial(self.run, usual)}
        for other in OTHERS[self.tiles]:
            named: dict[str, Any] = {self.tiles: other}
            made[words(other)] = partial(self.run, replace(usual, **named))
        return made


def words(tiles: Tiles) -> str:
    """For a table."""
    shared = f", {tiles.per_sm} a multiprocessor" if tiles.per_sm > 1 else ""
    return f"{tiles.m}x{tiles.n}x{tiles.k}, {tiles.warps} warps, {tiles.stages} stages{shared}"


def layer_launches(case: GpuCase) -> list[LaunchCase]:
    """The launches of forward and backward but for the gather and the combine, on operands of the shapes they have."""
    x, ids, w, dy = case.inputs()
    up_eID = case.drawn(case.experts, 2 * case.hidden, case.dim, seed=8)
    down_eDF = case.drawn(case.experts, case.dim, case.hidden, seed=9)
    plan = plan_on_device(ids, case.experts)
    rows, dim, hidden, each = case.rows, case.dim, case.hidden, 2.0 * case.rows * case.dim * case.hidden
    weight_R, ends = w.reshape(-1).float(), plan.offsets_e
    pre, d_pre, h = (case.drawn(rows, width, seed=10) for width in (2 * hidden, 2 * hidden, hidden))
    out_RD, d_up, d_down = case.drawn(rows, dim, seed=11), torch.empty_like(up_eID), torch.empty_like(down_eDF)

    def down_gradient(launch: Launch) -> None:
        weight_grad(h, dy, ends, d_down.transpose(1, 2), launch, b_index_R=plan.row_R)

    def up_gradient(launch: Launch) -> None:
        weight_grad(x, d_pre, ends, d_up.transpose(1, 2), launch, a_index_R=plan.row_R)

    made: list[tuple[str, str | None, float, Callable[[Launch], object]]] = [
        ("place_slots", None, 0.0, lambda _: place_slots(ids, case.experts)),
        ("gate_up", "gate_up", 2 * each, lambda at: gate_up(x, plan.row_R, up_eID, ends, pre, h, at)),
        ("rows, h by down", "rows", each,
         lambda at: grouped_rows(h, down_eDF.transpose(1, 2), ends, out_RD, at, scale_R=weight_R)),
        ("hidden_grad", "dh", each, lambda at: hidden_grad(dy, plan.row_R, down_eDF, weight_R, ends, pre, at)),
        ("weight_grad of down", "wgrad_gathered", each, down_gradient),
        ("weight_grad of up", "wgrad_gathered", 2 * each, up_gradient),
        ("weight_grad, nothing gathered", "wgrad", each,
         lambda at: weight_grad(h, out_RD, ends, d_down.transpose(1, 2), at)),
        ("rows, d_pre by up", "across", 2 * each, lambda at: grouped_rows(d_pre, up_eID, ends, out_RD, at)),
    ]  # fmt: skip
    return [LaunchCase(name=name, tiles=tiles, flops=flops, run=run) for name, tiles, flops, run in made]
