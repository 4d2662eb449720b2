"""Positions and ranks: (batch, position) <-> rank, expert <-> rank, and aligned segments. Pure integer arithmetic.

    positions  0 1 2 3 4 5 6            L = 7 over 3 ranks: cuts (0, 3, 5, 7)
    rank       0 0 0 1 1 2 2            the first L % ranks shards hold one position more

A rank of a sequence-sharded group holds *its positions of every sequence*: local token (b, l) of rank r is
global token (b, cuts[r] + l), never local + r * T_local.

Legend: b sequence, L its length, l local position, P ranks, E experts, e local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from trimtab.errors import ConfigError, InputError

ALIGNMENTS = (1, 8, 16, 32, 128)


def shard_cuts(length: int, ranks: int) -> tuple[int, ...]:
    """Cut points [ranks + 1] of `length` positions over `ranks`, as even as can be; shards may be empty."""
    if length < 0 or ranks < 1:
        raise InputError(f"cannot cut {length} positions over {ranks} ranks: need length >= 0 and ranks >= 1")
    base, extra = divmod(length, ranks)
    return tuple(rank * base + min(rank, extra) for rank in range(ranks + 1))


def experts_per_rank(num_experts: int, ranks: int) -> int:
    """e = E / P. Rank r owns the experts r * e .. r * e + e - 1."""
    if num_experts < 1 or ranks < 1 or num_experts % ranks:
        raise ConfigError(
            f"{num_experts} experts do not divide over {ranks} ranks "
            f"({num_experts} % {max(ranks, 1)} != 0): choose an expert-parallel size that divides {num_experts}"
        )
    return num_experts // ranks


def align_up(count: int, alignment: int) -> int:
    """The least multiple of `alignment` that is >= `count`; 0 stays 0."""
    return -(-count // alignment) * alignment


def segment_offsets(counts: Sequence[int], alignment: int = 1) -> tuple[int, ...]:
    """Start of each expert's segment, and the end of the last: [e + 1]. Each start is a multiple of `alignment`.

    The tokens of expert i lie at offsets[i] .. offsets[i] + counts[i] - 1; what is left up to offsets[i + 1] is
    padding. No routing map is changed and no token is lost, however small a segment is.
    """
    if alignment not in ALIGNMENTS:
        raise ConfigError(f"alignment {alignment} is not one of {ALIGNMENTS}")
    return (0, *accumulate(align_up(count, alignment) for count in counts))
