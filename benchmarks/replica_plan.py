"""`python -m benchmarks replica_plan`: what planning the replicas of one call costs a rank, on one thread of the CPU.

Plan: `replica_plan` with the rule, and with a tolerance. Cells: of this rank's own slots. Ids: of 32,768 slots. Counts
are those of 4,096 tokens on each rank, 8 experts each. Times of this thread's CPU, so that what else runs here
does not count; every call after the first ten.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.table import as_markdown
from benchmarks.workloads import draw
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replica_plan import physical_ids, replica_plan, slot_shares

SIZES = ((2, 8), (8, 64), (8, 128), (64, 64), (64, 256), (256, 512))
"""P, E."""
BARS = {(64, 256): 1.0, (256, 512): 5.0}
"""Milliseconds of a plan with the rule."""
TOKENS, TOP_K, CALLS = 4096, 8, 200


def report() -> str:
    """The table in Markdown, a row for each size and workload."""
    torch.set_num_threads(1)
    rows = []
    for (ranks, experts), workload in ((size, workload) for size in SIZES for workload in ("zipf", "hot_rank")):
        top_k, few = min(TOP_K, experts // 2), min(4, ranks)  # others hold what these do: drawing takes long
        some = [draw(workload, TOKENS, top_k, experts, rank=rank, ranks=ranks) for rank in range(few)]
        counts = [torch.bincount(ids_TK.flatten(), minlength=experts) for ids_TK in some]
        counts_HPE = torch.stack([counts[rank % few] for rank in range(ranks)])[None]
        rule, tenth = ReplicationConfig(copy_cost=1333), ReplicationConfig(tolerance=0.1, copy_cost=0)
        plan = replica_plan(counts_HPE, tenth)
        cells_EP = slot_shares(plan, counts_HPE, 0, 0)
        took = (
            _times(partial(replica_plan, counts_HPE, rule)),
            _times(partial(replica_plan, counts_HPE, tenth)),
            _times(partial(slot_shares, plan, counts_HPE, 0, 0)),
            _times(partial(physical_ids, some[0].int(), cells_EP, plan)),
        )
        bar = BARS.get((ranks, experts))
        rows.append([str(ranks), str(experts), workload, *map(_words, took), f"{bar:.0f}" if bar else ""])
    header = ["P", "E", "workload", "plan, rule", "plan, tolerance", "cells", "ids", "bar of the plan"]
    return f"Milliseconds, median (middle half) of {CALLS} calls.\n\n{as_markdown(header, rows)}"


def _times(call: Callable[[], object]) -> list[float]:
    """Milliseconds of each call."""
    found = []
    for _ in range(CALLS + 10):
        start = time.thread_time()
        call()
        found.append((time.thread_time() - start) * 1e3)
    return found[10:]


def _words(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"
