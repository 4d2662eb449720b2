"""Layout arithmetic: every position has one place, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import ConfigError, InputError
from trimtab.layout import ALIGNMENTS, SequenceLayout, experts_per_rank, segment_offsets, shard_cuts

lengths = st.lists(st.integers(0, 7), min_size=1, max_size=6)


@given(st.integers(0, 5), lengths)
def test_each_token_has_one_place(batch: int, shards: list[int]) -> None:
    layout = SequenceLayout.from_lengths(batch, shards)
    places = [layout.to_global(rank, i) for rank in range(layout.ranks) for i in range(layout.tokens(rank))]
    assert sorted(places) == list(range(batch * layout.length))


@given(st.integers(0, 5), lengths)
def test_a_rank_holds_its_positions_of_every_sequence_in_order(batch: int, shards: list[int]) -> None:
    layout = SequenceLayout.from_lengths(batch, shards)
    for rank in range(layout.ranks):
        expected = [
            b * layout.length + p for b in range(batch) for p in range(layout.cuts[rank], layout.cuts[rank + 1])
        ]
        assert [layout.to_global(rank, i) for i in range(layout.tokens(rank))] == expected


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


@pytest.mark.parametrize("cuts", [(0,), (1, 2), (0, 3, 2)])
def test_bad_cuts_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="cut points"):
        SequenceLayout(batch=1, cuts=cuts)


def test_tokens_outside_the_layout_are_refused() -> None:
    layout = SequenceLayout.even(2, 5, 3)
    with pytest.raises(InputError, match=r"not in 0\.\.3"):
        layout.to_global(0, 4)


def test_experts_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    assert experts_per_rank(12, 4) == 3
    with pytest.raises(ConfigError, match="6 % 4 != 0"):
        experts_per_rank(6, 4)
    with pytest.raises(ConfigError, match="alignment 3"):
        segment_offsets([1], 3)
