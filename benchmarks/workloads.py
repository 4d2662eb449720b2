"""Workloads of benchmarks: those that `trimtab plan` draws, and one whose ranks hold different numbers of tokens.

    source_ragged      balanced, but rank r holds r + 1 shares of the tokens

Legend: T local tokens, K experts per token, P ranks.
"""

from __future__ import annotations

from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.layout import experts_per_rank
from trimtab.plan import traffic

WORKLOADS = (*traffic.SKEWS[2:], "source_ragged")


def token_counts(workload: str, tokens: int, ranks: int) -> tuple[int, ...]:
    """[P] tokens of each rank; `tokens` per rank on average."""
    if workload != "source_ragged":
        return (tokens,) * ranks
    shares, total = ranks * (ranks + 1) // 2, tokens * ranks
    counts = [total * (rank + 1) // shares for rank in range(ranks)]
    counts[-1] += total - sum(counts)
    return tuple(counts)


def draw(workload: str, tokens: int, top_k: int, num_experts: int, *, rank: int = 0, ranks: int = 1) -> Tensor:
    """[T, K] int64 expert ids of one rank, K different ones per token.

    tokens: per rank on average, see `token_counts`. Raises ConfigError for a name or sizes that do not fit.
    """
    if workload not in WORKLOADS:
        raise ConfigError(f"workload {workload!r} is not one of {', '.join(WORKLOADS)}")
    skew, count = "balanced" if workload == "source_ragged" else workload, token_counts(workload, tokens, ranks)[rank]
    return traffic.draw(skew, count, top_k, num_experts, rank=rank, ranks=ranks)


def lane_rows(ids_TK: Tensor, num_experts: int, ranks: int) -> list[int]:
    """[P] rows that go to each rank: one per (token, rank that owns one of its experts)."""
    owner_TK = ids_TK // experts_per_rank(num_experts, ranks)
    return [int((owner_TK == rank).any(1).sum()) for rank in range(ranks)]
