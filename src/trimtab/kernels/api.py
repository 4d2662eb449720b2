"""The interface of backends: grouped products, one matrix per expert over its own segment of rows.

    grouped_mm      y[segment i] = x[segment i] @ w[i]
    grouped_wgrad   dw[i]        = a[segment i]^T @ b[segment i]       or +=; zeros where the segment is empty
    grouped_sum     db[i]        = sum of the rows of segment i

`choose.BACKENDS` names them. Legend: R expert rows, e experts (of a block), A and B the widths of a GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Experts and expert rows that are worked on together.

    offsets_e: [e + 1] within the block's rows. sizes: rows of each expert, where the host knows them. tail: somebody
    reads the results of rows behind the last segment.
    """

    experts: slice
    rows: slice
    offsets_e: Tensor
    sizes: tuple[int, ...] = ()
    tail: bool = True

    @cached_property
    def ends_e(self) -> Tensor:
        """[e] int32, as torch's grouped GEMM takes them."""
        return self.offsets_e[1:].int()

    @cached_property
    def empty_e11(self) -> Tensor:
        """[e, 1, 1] True for an expert without rows."""
        return (self.offsets_e[1:] == self.offsets_e[:-1])[:, None, None]


class Backend(Protocol):
    """Products for grouped layers and expert MLPs. Results belong to the caller, who may change them in place."""

    name: str
    weighs_sums: bool
    """True if routing weights are to be taken into the combine rather than into hidden rows."""

    whole: bool
    """True if one block holds all experts and rows."""

    def blocks(self, offsets_e: Tensor, rows: int, together: int = 0) -> Iterator[Block]:
        """The blocks of the segments at `offsets_e` [e + 1] of `rows` rows, in order: each expert once, each row of a
        segment once. Rows behind the last segment may or may not be in a block.

        together: a backend that takes the experts one by one may give a block several of so many rows in all.
        """

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a block of products in `dtype` is best computed; never narrower."""

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Like `torch.empty_like`, perhaps in memory that was used before."""

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        """x[index] for the rows of one block; anything where the index is -1, behind the last segment."""

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype, offsets_e: Tensor) -> Tensor:
        """[rows, width] of `dtype` for the blocks' results: not initialized, but zero where no block reaches."""

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        """[R, B]. Rows behind the last segment come out zero, whatever `x_RA` holds there, if `block.tail`.

        x_RA: in `compute_dtype` of the weight's dtype.
        """

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        """Into `out_eAB`, of any strides and dtype, whatever it held; with `add` on top of what it held."""

    def grouped_sum(self, rows_RA: Tensor, block: Block) -> Tensor:
        """[e, A]."""

    def expand(self, values_eA: Tensor, block: Block) -> Tensor:
        """Each expert's row of values for each of its rows, zero behind the last segment: broadcastable to [R, A]."""


def as_it_lies(out_eAB: Tensor, a_RA: Tensor, b_RB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same weight gradient with its operands in the order in which `out_eAB` is contiguous.

    A copy into other memory that turns its operand takes several times as long.
    """
    turned = out_eAB.transpose(1, 2)
    return (turned, b_RB, a_RA) if turned.is_contiguous() else (out_eAB, a_RA, b_RB)


def put(target: Tensor, value: Tensor, add: bool) -> None:
    """Write `value` into `target`, or add it, in the target's dtype."""
    if add:
        target.add_(value)
    else:
        target.copy_(value)


def put_each(targets: Sequence[Tensor | None], values: Sequence[Tensor], adds: Sequence[bool]) -> None:
    """`put` each that there is a target for."""
    for target, value, add in zip(targets, values, adds, strict=True):
        if target is not None:
            put(target, value, add)
