"""Many ranks in one process: the stages of P as they stand, with a transport that hands rows over in memory.

Legend: P ranks, T tokens of a rank, K experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.dispatch.plan import RankPlan, plan_ranks, sort_by_rank
from trimtab.dispatch.transport import Handshake


@dataclass
class World:
    """All ranks' plans for one call, and what each would send to each."""

    plans: list[RankPlan]
    headers: list[Handshake]


def connect(ids_by_rank: list[Tensor], num_experts: int) -> World:
    """SpreadRanks of every rank for its ids [T, K]; header columns are (rows, slots)."""
    ranks = len(ids_by_rank)
    sorts = [sort_by_rank(ids, num_experts // ranks, ranks) for ids in ids_by_rank]
    everyone = [torch.stack((s.rows_P, s.slots_P), 1).tolist() for s in sorts]
    headers = [
        Handshake(sent=everyone[r], received=[row[r] for row in everyone], everyone=everyone) for r in range(ranks)
    ]
    plans = [plan_ranks(s, int(s.rows_P.sum()), int(s.slots_P.sum())) for s in sorts]
    return World(plans=plans, headers=headers)


def move(rows_by_rank: list[Tensor], world: World, column: int, back: bool = False) -> list[Tensor]:
    """The exchange: each rank's rows, grouped by destination, to all destinations, grouped by source."""
    splits = [h.split_sizes(column) for h in world.headers]
    splits = [split.reversed() if back else split for split in splits]
    parts = [rows.split(split.outgoing) for rows, split in zip(rows_by_rank, splits, strict=True)]
    return [torch.cat([parts[s][d] for s in range(len(parts))]) for d in range(len(parts))]
