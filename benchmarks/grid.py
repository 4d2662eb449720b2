"""All cases of `trimtab bench all`: what the page is made of. Each is one file of results, so that a run can go on.

Legend: shapes A, B and C are those of `benchmarks.layer_case`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.exchange import DIRECT, exchange_task
from benchmarks.kernels import kernels_task
from benchmarks.layer import layer_task
from benchmarks.layer_case import SHAPES
from benchmarks.subject import BOTH
from benchmarks.task import Task
from benchmarks.train import train_task

KERNELS = {"bf16": ("auto", "loop"), "fp32": ("auto",)}


def all_tasks(folder: Path, kernels: Sequence[str], *, quick: bool) -> list[Task]:
    """The most important first. folder: where presets are written. kernels: the sets that race in `kernels`.

    Of layers races "auto", which is what users get; in bf16 also "loop", which is stock PyTorch alone.

    quick: shape A at 256 and 2,048 tokens and little else, to see that all of it runs.
    """
    shapes = ["A"] if quick else list(SHAPES)
    threads = (1,) if quick else (1, 2)
    several = (2,) if quick else (2, 4)
    large = (2048,) if quick else (2048, 8192)
    tasks: list[Task] = []
    alone = partial(layer_task, peers=["grouped_mm"])
    for dtype, tokens, shape, n in product(("bf16", "fp32"), large, shapes, threads):
        tasks.append(alone(SHAPES[shape], tokens=tokens, dtype=dtype, threads=n, kernels=KERNELS[dtype], memory=n == 1))
    for shape, dtype, n in product(shapes, ("bf16", "fp32"), threads):
        few = partial(alone, SHAPES[shape], tokens=256, dtype=dtype, threads=n)
        tasks += [few(kernels=KERNELS[dtype]), few(modes=[BOTH], in_place=True)]
    for ranks, shape in product(several, shapes):
        moved = partial(exchange_task, SHAPES[shape], tokens=2048 if quick else 8192, dtype="bf16", ranks=ranks)
        tasks.append(moved(transports=["allgather", *DIRECT], peers=["all_to_all"]))
    spread = partial(layer_task, tokens=2048, transports=DIRECT, modes=[BOTH])
    for ranks, dtype, shape in product(several, ("bf16", "fp32"), shapes):
        tasks.append(spread(SHAPES[shape], dtype=dtype, ranks=ranks, peers=_peers(ranks)))
    uneven = ("balanced", "random", "zipf", "hot", "zero_expert_rank")
    tasks += [layer_task(SHAPES[shape], tokens=2048, dtype="bf16", workloads=uneven, modes=[BOTH]) for shape in shapes]
    for workload in ("zero_expert_rank", "source_ragged"):
        tasks.append(spread(SHAPES["A"], dtype="bf16", ranks=2, workloads=[workload], peers=["all_to_all"]))
    for shape, dtype in product(shapes, ("bf16", "fp32")):
        tasks.append(kernels_task(SHAPES[shape], tokens=2048, dtype=dtype, kernels=kernels))
    return tasks + [train_task("qwen3_moe", ranks=ranks, folder=folder) for ranks in (1, *several)]


def _peers(ranks: int) -> list[str]:
    """torchtitan's layer on two ranks, where it is installed."""
    titan = ranks == 2 and importlib.util.find_spec("torchtitan") is not None
    return ["all_to_all", *(["torchtitan"] if titan else [])]
