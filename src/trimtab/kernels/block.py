"""What every set of kernels works on: a block of experts and their rows.

Legend: e experts of the block, R expert rows, A and B the widths of a GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Experts and expert rows that are worked on together.

    offsets_e: [e + 1] within the block's rows. sizes: rows of each expert, where the host knows them.
    """

    experts: slice
    rows: slice
    offsets_e: Tensor
    sizes: tuple[int, ...] = ()


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
