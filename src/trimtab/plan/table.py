"""Layouts as lines of a table."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from trimtab.plan.layouts import Layout, Machine, plan_layout, skeleton_of
from trimtab.train.config import Mesh, TrainConfig

SHOWN = {
    "weights": "weights", "moments": "moments", "gradients": "  grads", "activations": "activ.", "exchange": " exch.",
    "copies": "copies", "gathered": "gathered", "other": " other",
}  # fmt: skip


@contextlib.contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Libraries say nothing, as no run is there that their advice would help."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed", "transformers")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def table(rows: Sequence[Layout], machine: Machine) -> Iterator[str]:
    """A line for each layout, in GB, or in MB where all are small, under their heading; and what the machine adds."""
    unit, named = (1e9, "GB") if any(row.peak[1] >= 1e9 for row in rows if not row.refused) else (1e6, "MB")
    at = max((len(row.peak[0]) for row in rows if not row.refused), default=2)
    fits = "" if machine.bytes is None else f" | fits {machine.bytes / 1e9:g} GB, {machine.device.free:.0%} kept free"
    yield f" ep fsdp tp repl recompute |   peak  {'  '.join(SHOWN.values())} | {'at':{at}} | at least{fits}"
    for row in rows:
        mesh, again = row.mesh, "yes" if row.config.gradient_checkpointing else "no"
        line = f"{mesh.ep:3}{mesh.fsdp:5}{mesh.tp:3}{mesh.replicate:5} {again:9} | "
        if row.refused:
            yield line + row.words
            continue
        stage, most, held = row.peak
        parts = "  ".join(f"{held[name] / unit:{len(shown)}.2f}" for name, shown in SHOWN.items())
        line += f"{most / unit:6.2f}  {parts} | {stage:{at}} | {row.seconds:6.2g} s"
        yield f"{line} | {row.words}" if fits else line
    outside = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in machine.device.outside.items())
    yield (
        f"The columns are in {named}. {f'Beside them, in GB: {outside}. ' if outside else ''}At least: at "
        f"{machine.flops / 1e12:g} TFLOP/s and {machine.link / 1e9:g} GB/s."
    )


def memory_lines(config: TrainConfig, ranks: int) -> Iterator[str]:
    """What a run holds in its own layout."""
    config, machine = config.resolved(), Machine(kind="cuda" if torch.cuda.is_available() else "cpu")
    skeleton, experts = skeleton_of(config)
    with quiet(config.debug):
        mesh = Mesh.of(config, world=ranks, num_experts=experts)
        row = plan_layout(config, mesh, machine, skeleton=skeleton)
    yield "memory  of a rank: as below where tokens fall evenly; trimtab plan has other layouts, and tokens that do not"
    yield from table([row], machine)


def skew_lines(rows: Iterable[Layout]) -> Iterator[str]:
    """What the same layout holds as tokens fall otherwise."""
    told = [f"{row.skew} {row.peak[1] / 1e9:.2f}{'' if row.left >= 0 else ' (does not fit)'}" for row in rows]
    if told:
        yield f"skew    the first layout, in GB: {', '.join(told)}"
