"""`python -m benchmarks replica_model`: what copying experts saves, by a cost model over links, models and workloads.

The plans are real, made from drawn tokens; time is modeled, forward and backward, nothing overlapped: the products of
the rank with the most slots, the rows through the busiest rank (one per token and rank that it goes to) in bfloat16,
and the replicas through the busiest rank, weights twice and gradients once. `copy_cost` is what the model says that a
copy costs. A speed-up is the time without replicas over the time with them.

Legend: D model dim, F expert hidden dim, E experts, e local ones, K experts per token, P ranks, T tokens of a rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.table import as_markdown
from benchmarks.workloads import WORKLOADS, draw
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replica_plan import physical_ids, replica_plan, slot_shares
from trimtab.errors import ConfigError

LINKS = {"Gloo, AMX": (1e12, 2e9), "NVLink": (600e12, 450e9), "InfiniBand": (600e12, 50e9)}
"""FLOP/s and bytes/s of a rank."""
MODELS = {
    "Qwen3-30B": (2048, 768, 128, 8), "Mixtral-8x7B": (4096, 14336, 8, 2), "gpt-oss-20b": (2880, 2880, 32, 4),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}  # fmt: skip
"""D, F, E, K."""
SIZES = ((2, 512), (2, 4096), (2, 16384), (4, 512), (4, 4096), (4, 16384), (8, 512), (8, 4096), (8, 16384), (64, 512),
         (64, 4096))  # fmt: skip
"""P, T."""
BOUND = 0.97
"""Less than this of plain expert parallelism's speed the rule may never have."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one plan makes of one batch. slots: of the most loaded rank. rows, replicas: into or out of the busiest."""

    slots: int
    rows: int
    replicas: int
    all_copies: int

    def seconds(self, link: str, dim: int, hidden: int) -> float:
        """Forward and backward."""
        rate, speed = LINKS[link]
        return self.slots * 18 * dim * hidden / rate + (self.rows * 8 * dim + self.replicas * 18 * dim * hidden) / speed


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Speed-ups at one place of the grid. uneven: most slots of a rank over the mean, without replicas."""

    link: str
    model: str
    ranks: int
    tokens: int
    workload: str
    uneven: float
    exact: float
    tenth: float
    rule: float
    replicas: int


def cells(workload: str, model: str, ranks: int, tokens: int) -> Iterator[Cell]:
    """One cell for each link; none where the model has no such ranks or workload."""
    dim, hidden, experts, top_k = MODELS[model]
    try:
        ids = [draw(workload, tokens, top_k, experts, rank=rank, ranks=ranks) for rank in range(ranks)]
    except ConfigError:
        return
    counts = torch.stack([torch.bincount(ids_TK.flatten(), minlength=experts) for ids_TK in ids])[None]
    with_plan = partial(traffic, ids, counts)
    plain = with_plan(ReplicationConfig(tolerance=ranks, copy_cost=0))
    exact, tenth = (with_plan(ReplicationConfig(tolerance=t, copy_cost=0)) for t in (0.0, 0.1))
    for link, (rate, speed) in LINKS.items():
        rule = with_plan(ReplicationConfig(copy_cost=round(rate / speed)))
        seconds = [found.seconds(link, dim, hidden) for found in (plain, exact, tenth, rule)]
        yield Cell(
            link=link, model=model, ranks=ranks, tokens=tokens, workload=workload, replicas=rule.all_copies,
            uneven=plain.slots * ranks / int(counts.sum()), exact=seconds[0] / seconds[1],
            tenth=seconds[0] / seconds[2], rule=seconds[0] / seconds[3],
        )  # fmt: skip


def traffic(ids: Sequence[Tensor], counts_HPE: Tensor, config: ReplicationConfig) -> Traffic:
    """Of every rank's tokens, `ids` [T, K] each."""
    plan = replica_plan(counts_HPE, config)
    _, ranks, experts = counts_HPE.shape
    rows_PP = torch.zeros(ranks, ranks, dtype=torch.int64)
    for rank, ids_TK in enumerate(ids):
        places_TK = physical_ids(ids_TK, slot_shares(plan, counts_HPE, 0, rank), plan)
        to_TP = torch.zeros(ids_TK.shape[0], ranks, dtype=torch.bool)
        rows_PP[rank] = to_TP.scatter_(1, places_TK // (2 * experts // ranks), True).sum(0)
    rows_PP.fill_diagonal_(0)
    return Traffic(
        slots=int(plan.loads_after_P.max()),
        rows=_busiest(rows_PP),
        replicas=_busiest(plan.replicas_PP),
        all_copies=int(plan.replicas_PP.sum()),
    )


def _busiest(moved_PP: Tensor) -> int:
    return int(torch.maximum(moved_PP.sum(0), moved_PP.sum(1)).max())


def report() -> str:
    """The tables in Markdown. Raises RuntimeError where the rule is slower than the bound allows."""
    torch.set_num_threads(1)
    found = [
        cell
        for (ranks, tokens), model, workload in product(SIZES, MODELS, WORKLOADS)
        if MODELS[model][2] % ranks == 0
        for cell in cells(workload, model, ranks, tokens)
    ]
    worst = min(found, key=lambda cell: cell.rule)
    text = "\n\n".join(
        (
            f"{len(found)} cells: {', '.join(f'{p} ranks of {t} tokens' for p, t in SIZES)}; {', '.join(MODELS)}. "
            f"The rule is slowest, {worst.rule:.3f} of plain, at {worst.link}, {worst.model}, {worst.workload}, "
            f"{worst.ranks} ranks of {worst.tokens} tokens; it may not be under {BOUND}.",
            "Speed-ups: least, median and most of a row's cells.",
            as_markdown(["link", "workload", "max/mean", "tolerance 0", "tolerance 0.1", "rule"], _summary(found)),
            "Speed-ups of the rule with 4,096 tokens on a rank, and replicas of all ranks together.",
            as_markdown(["P", "model", "workload", "max/mean", *LINKS], _at_4096(found)),
        )
    )
    if worst.rule < BOUND:
        raise RuntimeError(text)
    return text


def _summary(found: Sequence[Cell]) -> list[list[str]]:
    rows = []
    for link, workload in product(LINKS, WORKLOADS):
        here = [cell for cell in found if (cell.link, cell.workload) == (link, workload)]
        each = ([getattr(cell, name) for cell in here] for name in ("uneven", "exact", "tenth", "rule"))
        words = (f"{min(v):.2f} {statistics.median(v):.2f} {max(v):.2f}" for v in each)
        rows.append([link, workload, *words])
    return rows


def _at_4096(found: Sequence[Cell]) -> list[list[str]]:
    at: dict[tuple[int, str, str], list[Cell]] = {}
    for cell in found:
        if cell.tokens == 4096 and cell.ranks > 2:
            at.setdefault((cell.ranks, cell.model, cell.workload), []).append(cell)
    return [
        [str(ranks), model, workload, f"{here[0].uneven:.2f}", *(f"{c.rule:.2f} ({c.replicas})" for c in here)]
        for (ranks, model, workload), here in at.items()
    ]
