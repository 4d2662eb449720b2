"""The plan of an exchange, built once per layer call: T tokens -> M rows, one per (token, rank that owns one of its
experts), grouped by rank, by one stable sort of narrow keys over the slots; nothing of size T x P is made. A slot that
is dropped gets the key behind the last group and so falls off the end.

Legend: T local tokens, K experts per token, N = T * K slots, P ranks, M rows sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.kernels.rows import Csr, compact, csr_of, inverse_of, narrow


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The plan of one call on one rank.

    row_token_M: [M] token of each row; rows are grouped by rank, in token order within a rank.
    token_csr: T bags over the M rows, the ranks of a token in the order of its slots.
    slot_csr: T bags over the kept slots grouped by (rank, token, k), the order in which slots come back; or None.
    """

    row_token_M: Tensor
    token_csr: Csr
    slot_csr: Csr | None


class RankSort(NamedTuple):
    """The part of a `RankPlan` that needs no count from the host: the rows and kept slots for each rank, [P] int64,
    which are sent to be counted, and the sort."""

    rows_P: Tensor
    slots_P: Tensor
    order_N: Tensor
    token_N: Tensor
    row_N: Tensor
    new_row_N: Tensor
    kept_N: Tensor
    tokens: int


def sort_by_rank(ids_TK: Tensor, experts_per_rank: int, ranks: int) -> RankSort:
    """Group the slots of `ids_TK` [T, K] (global expert ids, negative = dropped) by the rank that owns them."""
    tokens, top_k = ids_TK.shape
    ids_N = ids_TK.reshape(-1)
    kept_N = ids_N >= 0
    key_N = torch.where(kept_N, ids_N.div(experts_per_rank, rounding_mode="floor"), ranks)
    sorted_key_N, order_N = torch.sort(narrow(key_N, ranks), stable=True)
    # Each sorted slot's token: looked up, for a division of 64-bit integers takes ten times as long.
    token_N = torch.arange(tokens, device=ids_N.device)[:, None].expand(tokens, top_k).reshape(-1)
    sorted_token_N = token_N.index_select(0, order_N)
    # A row begins where the token or the rank changes; -1 differs from every token.
    before = torch.full((1,), -1, dtype=torch.int64, device=ids_N.device)
    new_row_N = sorted_token_N != torch.cat((before, sorted_token_N))[:-1]
    new_row_N |= sorted_key_N != torch.cat((before.to(sorted_key_N.dtype), sorted_key_N))[:-1]
    new_row_N &= sorted_key_N < ranks
    rows_N = new_row_N.cumsum(0)
    # Where each rank's slots begin, and how many rows lie before.
    cuts_P1 = torch.searchsorted(sorted_key_N, torch.arange(ranks + 1, device=ids_N.device, dtype=sorted_key_N.dtype))
    rows_before_P1 = torch.cat((before + 1, rows_N)).index_select(0, cuts_P1)
    return RankSort(
        rows_P=rows_before_P1.diff(), slots_P=cuts_P1.diff(), order_N=order_N, token_N=sorted_token_N, row_N=rows_N - 1,
        new_row_N=new_row_N, kept_N=kept_N, tokens=tokens,
    )  # fmt: skip


def plan_ranks(sort: RankSort, num_rows: int, num_slots: int, *, ordered: bool = True) -> RankPlan:
    """The `RankPlan` of a sort, once the host knows how many rows and kept slots leave this rank. ordered: slots come
    back one by one, so that `slot_csr` is needed."""
    order_N = sort.order_N
    first_N = torch.empty_like(sort.new_row_N).scatter_(0, order_N, sort.new_row_N)
    slot_row_N = torch.empty_like(sort.row_N).scatter_(0, order_N, sort.row_N)
    return RankPlan(
        row_token_M=compact(sort.token_N, sort.new_row_N, num_rows),
        token_csr=csr_of(slot_row_N, first_N, sort.tokens, num_rows, whole=True),
        slot_csr=csr_of(inverse_of(order_N), sort.kept_N, sort.tokens, num_slots, whole=True) if ordered else None,
    )
