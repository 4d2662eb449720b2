"""How tokens fall: expert ids per rank for each named pattern, and different data on every rank.

Legend: T tokens of a rank, K experts per token, E experts, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

PATTERNS = (
    "random", "one_expert", "one_rank", "cold_rank", "empty_source", "ragged", "empty_world", "one_token",
    "dropped", "all_dropped", "duplicates", "masked",
)  # fmt: skip


def case(
    pattern: str, rank: int, ranks: int, num_experts: int, top_k: int, width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(x [T, D], ids [T, K], weights [T, K], token mask [T] or None) of one rank. Masked rows of x hold NaN."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    e = num_experts // ranks
    tokens = {
        "empty_source": 0 if rank == ranks - 1 else 9, "ragged": 3 + 5 * rank, "empty_world": 0,
        "one_token": int(rank == 0),
    }.get(pattern, 11)  # fmt: skip
    ids = torch.rand(tokens, num_experts, generator=g).argsort(1)[:, :top_k]
    mask = None
    if pattern == "one_expert":
        ids = torch.full_like(ids, num_experts - 1)
    elif pattern == "one_rank":
        ids = ids % e
    elif pattern == "cold_rank":
        ids = torch.where(ids >= num_experts - e, ids % max(num_experts - e, 1), ids)
    elif pattern == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.5, -1)
    elif pattern == "all_dropped":
        ids = torch.full_like(ids, -1)
    elif pattern == "duplicates":
        ids = ids[:, :1].expand(-1, top_k).contiguous()
    x = torch.randn(tokens, width, generator=g, dtype=torch.float64).to(dtype)
    if pattern == "masked":
        mask = torch.rand(tokens, generator=g) < 0.5
        x[~mask] = float("nan")
    weights = torch.rand(tokens, top_k, generator=g, dtype=torch.float64)
    return x, ids, weights.to(torch.promote_types(dtype, torch.float32)), mask
