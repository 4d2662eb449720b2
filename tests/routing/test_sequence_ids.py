"""`sequence_ids`: prefix sums and positions that begin anew say the same; what is neither is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import trimtab
from trimtab.errors import InputError

LENGTHS = [[5, 1, 3], [2, 7]]


def ids_of(lengths: list[list[int]]) -> Tensor:
    return torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("row", [[5, 1, 3], [9], [1, 1], [0, 2, 0, 0, 3, 0], []], ids=str)
def test_prefix_sums_and_positions_say_the_same(row: list[int], dtype: torch.dtype) -> None:
    ends = torch.tensor([0, *row]).cumsum(0).to(dtype)
    places = torch.cat([torch.arange(n) for n in row] or [torch.arange(0)])[None].to(dtype)
    by_ends, by_places = trimtab.sequence_ids(cu_seqlens=ends), trimtab.sequence_ids(position_ids=places)
    assert by_ends.dtype == by_places.dtype == torch.long
    assert torch.equal(by_ends, ids_of([row]))
    changes = (by_places[:, 1:] != by_places[:, :-1]).equal(by_ends[:, 1:] != by_ends[:, :-1])
    assert changes
    if 0 not in row:
        assert torch.equal(by_places, by_ends)


def test_rows() -> None:
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    assert torch.equal(trimtab.sequence_ids(position_ids=places, shape=places.shape), ids_of(LENGTHS))
    ends = torch.tensor([0, 5, 6, 9, 11, 18], dtype=torch.int32)
    ids = trimtab.sequence_ids(cu_seqlens=ends, shape=(2, 9))
    assert torch.equal(ids, ids_of(LENGTHS) + torch.tensor([[0], [3]]))
    goes_on = torch.tensor([[7, 8, 0, 1]])
    assert trimtab.sequence_ids(position_ids=goes_on).tolist() == [[0, 0, 1, 1]]


def tensor(*values: Any, **more: Any) -> Tensor:
    return torch.tensor(values, **more)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "one of them"),
        ({"cu_seqlens": tensor(0, 2), "position_ids": tensor(0, 1)}, "one of them"),
        ({"cu_seqlens": tensor(0, 5, 3, 9)}, "must ascend"),
        ({"cu_seqlens": tensor(0, 12, 9)}, "must ascend"),
        ({"cu_seqlens": tensor(1, 5)}, "from 1 to 5: expected 0 to 5"),
        ({"cu_seqlens": tensor(0, 5), "shape": (1, 6)}, "from 0 to 5: expected 0 to 6"),
        ({"cu_seqlens": tensor(0, 7), "shape": (2, 3)}, "from 0 to 7: expected 0 to 6"),
        ({"cu_seqlens": tensor(0.0, 5.0)}, "are integers, got torch.float32"),
        ({"cu_seqlens": tensor([0, 5])}, r"must be \[n \+ 1\]"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"must be \[n \+ 1\]"),
        ({"position_ids": tensor([0, 1, 3])}, r"from 1 to 3 at position 2 of row \[0\]"),
        ({"position_ids": tensor([0, 1, 2], [0, 0, 2])}, r"from 0 to 2 at position 2 of row \[1\]"),
        ({"position_ids": tensor([0, 1, 1])}, "from 1 to 1"),
        ({"position_ids": tensor([0, 1, 2]), "shape": (1, 4)}, r"shape \(1, 4\), got \(1, 3\)"),
        ({"position_ids": torch.tensor(0)}, r"must be \[\.\.\., L\]"),
        ({"position_ids": tensor([0.0, 1.0])}, "are integers"),
    ],
)  # fmt: skip
def test_what_is_neither_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        trimtab.sequence_ids(**given)
