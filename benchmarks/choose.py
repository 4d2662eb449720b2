"""The tasks that a command line asks for: every combination of the options that take several values."""

from __future__ import annotations

from argparse import Namespace
from itertools import product
from pathlib import Path

from benchmarks.exchange import DIRECT, exchange_task
from benchmarks.kernels import kernels_task
from benchmarks.layer import layer_task
from benchmarks.layer_case import parse_shape
from benchmarks.task import Task
from benchmarks.train import train_task
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.needed import import_transformers
from trimtab.kernels.grouped import KERNELS
from trimtab.launched import cores

PRESETS = Path("runs/bench/presets")


def kernel_sets() -> list[str]:
    """The names of this installation's kernel sets for the CPU."""
    return [name for name in KERNELS if name != "triton"]


def tasks_of(o: Namespace) -> list[Task]:
    """o: the options of `trimtab bench layer|kernels|exchange|train`. Raises ConfigError for what does not fit."""
    _check(o)
    if o.part == "train":
        return _train(o)
    shapes = [parse_shape(shape) for shape in o.shape]
    transports = getattr(o, "transports", None) or DIRECT
    if o.part == "layer":
        return [
            layer_task(
                shape, tokens=tokens, dtype=dtype, threads=threads, ranks=ranks, workloads=o.workloads,
                kernels=o.kernels or ["auto"], transports=transports, peers=o.peers, modes=o.modes,
                in_place=o.in_place, memory=o.memory, family=o.family,
            )
            for shape, tokens, dtype, threads, ranks in product(shapes, o.tokens, o.dtype, o.threads, o.ranks)
        ]  # fmt: skip
    if o.part == "kernels":
        return [
            kernels_task(
                shape, tokens=tokens, dtype=dtype, threads=threads, workload=workload,
                kernels=o.kernels or kernel_sets(),
            )
            for shape, tokens, dtype, threads, workload in product(shapes, o.tokens, o.dtype, o.threads, o.workloads)
        ]  # fmt: skip
    return [
        exchange_task(
            shape, tokens=tokens, dtype=dtype, ranks=ranks, workload=workload, transports=transports, peers=o.peers
        )
        for shape, tokens, dtype, ranks, workload in product(shapes, o.tokens, o.dtype, o.ranks, o.workloads)
    ]


def _check(o: Namespace) -> None:
    """Raise ConfigError for what no contestant could do."""
    for name in ("tokens", "threads", "ranks"):
        if any(value < 1 for value in getattr(o, name, [])):
            raise ConfigError(f"--{name} {' '.join(map(str, getattr(o, name)))}: each must be at least 1")
    for name in ("batch_size", "seq_len"):
        if getattr(o, name, 1) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(o, name)}: must be at least 1")
    most, there_are = max(getattr(o, "threads", [1])), cores()
    if most > there_are:
        raise ConfigError(f"--threads {most}: this process has {there_are} core(s), on which more threads only wait")
    for name, known in (("kernels", ("auto", *kernel_sets())), ("transports", tuple(TRANSPORTS))):
        if wrong := [given for given in getattr(o, name, None) or [] if given not in known]:
            raise ConfigError(f"--{name} {wrong[0]}: must be one of {', '.join(known)}")


def _train(o: Namespace) -> list[Task]:
    if wrong := [peer for peer in o.peers if peer != "stock"]:
        raise ConfigError(f"--peers {wrong[0]}: of training steps there is only stock")
    import_transformers("benchmarks train")
    return [
        train_task(
            o.preset, ranks=ranks, threads=threads, folder=PRESETS, batch_size=o.batch_size, seq_len=o.seq_len,
            stock="stock" in o.peers,
        )
        for ranks, threads in product(o.ranks, o.threads)
    ]  # fmt: skip
