"""Sizes of a call that are known before it is routed: with a tolerance no rank computes more than a cap of all slots.

Legend: P ranks, E experts, e = E / P local ones, T tokens of all ranks, K experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

from trimtab.dispatch.options import PARTS, ReplicationConfig


class ReplicaBounds(NamedTuple):
    """The most that any rank has in one call, whatever the router says.

    expert_rows: slots that it computes, its own experts' and replicas' together; either may have them all.
    rows: rows that it receives, one per token that needs one of its experts or replicas.
    replicas: experts of other ranks that it is sent. replicas_sent: replicas of its own experts that it sends.
    """

    expert_rows: int
    rows: int
    replicas: int
    replicas_sent: int


def replica_bounds(
    config: ReplicationConfig, *, tokens: int, top_k: int, num_experts: int, ranks: int
) -> ReplicaBounds:  # fmt: skip
    """The bounds of any call with at most so many tokens on all ranks together, those that share F included.

    A rank computes at most ceil(T K / P) slots and the tolerance of that: the plan moves whatever is above, and fewer
    slots, as where some are dropped, have no larger cap. A received row has a slot here and a token of its own.
    Replicas come to a rank at most e, see `rule`; and what a donor gives is cut at most where one of
    its e experts or one of its P - 1 receivers begins.
    """
    assert config.parts is not None, "without a tolerance the cap depends on the counts"
    e, slots, more = num_experts // ranks, tokens * top_k, ranks > 1
    mean = -(-slots // ranks)
    most = min(mean + mean * config.parts // PARTS, slots)
    return ReplicaBounds(most, min(most, tokens), e * more, min(e * (ranks - 1), e + ranks - 2) * more)
