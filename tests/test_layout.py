"""Layout arithmetic, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import ConfigError
from trimtab.layout import ALIGNMENTS, experts_per_rank, segment_offsets, shard_cuts


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_shards_differ_by_one_at_most(length: int, ranks: int) -> None:
    cuts = shard_cuts(length, ranks)
    sizes = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from(ALIGNMENTS))
def test_segments_are_aligned_and_lose_nothing(counts: list[int], alignment: int) -> None:
    offsets = segment_offsets(counts, alignment)
    for count, start, end in zip(counts, offsets, offsets[1:], strict=False):
        assert start % alignment == 0
        assert count <= end - start < count + alignment


def test_experts_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    assert experts_per_rank(12, 4) == 3
    with pytest.raises(ConfigError, match="6 % 4 != 0"):
        experts_per_rank(6, 4)
    with pytest.raises(ConfigError, match="alignment 3"):
        segment_offsets([1], 3)
