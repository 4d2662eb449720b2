"""All cases of `trimtab bench all`: what the page is made of. Each is one file of results, so that a run can go on.

Legend: shapes A, B and C are those of `trimtab.bench.layer_case`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from trimtab.bench.exchange import exchange_task
from trimtab.bench.kernels import kernels_task
from trimtab.bench.layer import layer_task
from trimtab.bench.layer_case import SHAPES
from trimtab.bench.subject import BOTH
from trimtab.bench.task import Task
from trimtab.bench.train import train_task
from trimtab.bench.transports import direct


def all_tasks(folder: Path, kernels: Sequence[str], *, quick: bool) -> list[Task]:
    """folder: where presets are written. kernels: the sets that race in `kernels`.

    Of layers race "auto", which is what users get, and "loop", which is stock PyTorch alone.

    quick: shape A at 256 and 2,048 tokens and little else, to see that all of it runs.
    """
    shapes = ["A"] if quick else list(SHAPES)
    threads = (1,) if quick else (1, 2)
    sizes = (256, 2048) if quick else (256, 2048, 8192)
    tasks: list[Task] = []
    for tokens, shape, dtype, n in product(sizes, shapes, ("bf16", "fp32"), threads):
        alone = partial(layer_task, SHAPES[shape], tokens=tokens, dtype=dtype, threads=n, peers=["grouped_mm"])
        tasks.append(alone(kernels=("auto", "loop"), memory=n == 1 and tokens > 256))
        if tokens == 256:
            tasks.append(alone(modes=[BOTH], in_place=True))
    uneven = ("balanced", "zipf", "hot", "zero_expert_rank")
    tasks += [layer_task(SHAPES[shape], tokens=2048, dtype="bf16", workloads=uneven, modes=[BOTH]) for shape in shapes]
    spread = partial(layer_task, tokens=2048, transports=direct(), peers=["all_to_all"], modes=[BOTH])
    several = (2,) if quick else (2, 4)
    for ranks, shape, dtype in product(several, shapes, ("bf16", "fp32")):
        tasks.append(spread(SHAPES[shape], dtype=dtype, ranks=ranks))
    for workload in ("zero_expert_rank", "source_ragged"):
        tasks.append(spread(SHAPES["A"], dtype="bf16", ranks=2, workloads=[workload]))
    for shape, dtype in product(shapes, ("bf16", "fp32")):
        tasks.append(kernels_task(SHAPES[shape], tokens=2048, dtype=dtype, kernels=kernels))
    for ranks, shape in product(several, shapes):
        moved = partial(exchange_task, SHAPES[shape], tokens=2048 if quick else 8192, dtype="bf16", ranks=ranks)
        tasks.append(moved(transports=["allgather", *direct()], peers=["all_to_all"]))
    return tasks + [train_task("qwen3_moe", ranks=ranks, folder=folder) for ranks in (1, *several)]
