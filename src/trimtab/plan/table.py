"""Layouts as lines of a table."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence

import torch

from trimtab.plan.device import DEVICES, Device
from trimtab.plan.layouts import Layout, plan_layout
from trimtab.plan.ledger import CATEGORIES
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import inspect, num_experts


@contextlib.contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Libraries say nothing, as no run is there that their advice would help."""
    logging.disable(logging.NOTSET if debug else logging.WARNING)
    try:
        with warnings.catch_warnings(action=None if debug else "ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def table(rows: Sequence[Layout], device: Device) -> Iterator[str]:
    """A line for each layout, in GB, or in MB where all are small, under their heading; and what the machine adds."""
    planned = [row for row in rows if not row.refused]
    unit, named = (1e9, "GB") if any(row.peak[1] >= 1e9 for row in planned) else (1e6, "MB")
    at = max((len(row.peak[0]) for row in planned), default=2)
    fits = "" if device.bytes is None else f" | fits {device.bytes / 1e9:g} GB, {device.free:.0%} kept free"
    yield f" ep fsdp tp repl recompute |   peak  {'  '.join(CATEGORIES)} | {'at':{at}} | at least{fits}"
    for row in rows:
        ep, fsdp, tp, times, again = row.options.values()
        line = f"{ep:3}{fsdp:5}{tp:3}{times:5} {'yes' if again else 'no':9} | "
        if not row.refused:
            stage, most, held = row.peak
            parts = "  ".join(f"{held[name] / unit:{len(name)}.2f}" for name in CATEGORIES)
            line += f"{most / unit:6.2f}  {parts} | {stage:{at}} | {row.seconds:6.2g} s"
        yield line + (row.words if row.refused else f" | {row.words}" if fits else "")
    outside = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in device.outside.items())
    added = f"Beside them, in GB, by estimate: {outside}. " if outside else ""
    rates = f"{device.flops / 1e12:g} TFLOP/s and {device.link / 1e9:g} GB/s"
    kernels = "".join(f" Kernels: {name}." for name in sorted({row.kernels for row in planned}))
    yield f"The columns are in {named}. {added}At least: at {rates}.{kernels}"


def memory_lines(config: TrainConfig, ranks: int) -> Iterator[str]:
    """What a run holds in its own layout."""
    config, device = config.resolved(), DEVICES["cuda" if torch.cuda.is_available() else "cpu"]
    skeleton = inspect(config.model, config.attn)
    with quiet(config.debug):
        mesh = Mesh.of(config, world=ranks, num_experts=num_experts(skeleton))
        row = plan_layout(config, mesh, device, skeleton=skeleton)
    yield "memory  of a rank: as below where tokens fall evenly; trimtab plan has other layouts, and tokens that do not"
    yield from table([row], device)
