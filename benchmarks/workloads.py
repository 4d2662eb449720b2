"""How tokens fall on experts, by name; the same on every machine for a seed.

    balanced           every expert the same, in random company
    random             every expert as likely as any other
    zipf               the i-th most popular expert 1/i as often as the first
    hot                one expert in every token's choice, the others alike
    hot_rank           the first rank's experts in every token's choice, as many as it takes
    spread             one expert of every rank in every token's choice, as many as it takes
    rotating           the experts of the next rank in every token's choice: all ranks alike, all tokens leave
    burst              hot_rank for half of the tokens, random for the others
    zero_expert_rank   the last rank's experts get nothing (of one rank: the last quarter of its experts)
    source_ragged      balanced, but rank r holds r + 1 shares of the tokens

Legend: T local tokens, K experts per token, E experts, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.layout import experts_per_rank

WORKLOADS = (
    "balanced", "random", "zipf", "hot", "hot_rank", "spread", "rotating", "burst", "zero_expert_rank", "source_ragged",
)  # fmt: skip
WANTED = 1e6
"""Odds of an expert that is chosen before others."""


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
    g = torch.Generator().manual_seed(1000 + rank)
    count, e = token_counts(workload, tokens, ranks)[rank], experts_per_rank(num_experts, ranks)
    odds_E = torch.ones(num_experts)
    if workload in ("balanced", "source_ragged"):
        return _balanced(count, top_k, num_experts, g)
    if workload == "zipf":
        popular_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(7))
        odds_E[popular_E] = 1.0 / torch.arange(1, num_experts + 1)
    elif workload == "hot":
        odds_E[0] = torch.inf
    elif workload in ("hot_rank", "burst"):
        odds_E[:e] = WANTED
    elif workload == "spread":
        odds_E[::e] = WANTED
    elif workload == "rotating":
        odds_E[(rank + 1) % ranks * e :][:e] = WANTED
    elif workload == "zero_expert_rank":
        idle = e if ranks > 1 else num_experts // 4
        odds_E[num_experts - idle :] = 0.0
    if int((odds_E > 0).sum()) < top_k:
        raise ConfigError(f"workload {workload!r} leaves fewer than {top_k} of {num_experts} experts")
    # The K first arrivals of E exponential clocks: a draw without replacement with these odds.
    arrival_TE = torch.empty(count, num_experts).exponential_(generator=g).clamp_min_(1e-30)
    if workload == "burst":
        arrival_TE[::2] /= odds_E
    else:
        arrival_TE /= odds_E
    return arrival_TE.topk(top_k, largest=False).indices


def _balanced(tokens: int, top_k: int, num_experts: int, g: torch.Generator) -> Tensor:
    """Shuffled decks of all experts, dealt K at a time."""
    hands = num_experts // top_k
    if hands < 1:
        raise ConfigError(f"{top_k} of {num_experts} experts per token cannot be chosen")
    decks = torch.rand(-(-tokens // hands), num_experts, generator=g).argsort(1)
    return decks[:, : hands * top_k].reshape(-1, top_k)[:tokens].contiguous()


def lane_rows(ids_TK: Tensor, num_experts: int, ranks: int) -> list[int]:
    """[P] rows that go to each rank: one per (token, rank that owns one of its experts)."""
    owner_TK = ids_TK // experts_per_rank(num_experts, ranks)
    return [int((owner_TK == rank).any(1).sum()) for rank in range(ranks)]
