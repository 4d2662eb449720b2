"""What every set of kernels works on: a block of experts and their rows.

Legend: e experts of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Experts and expert rows that are worked on together. offsets_e: [e + 1] within the block's rows."""

    experts: slice
    rows: slice
    offsets_e: Tensor


def put(target: Tensor, value: Tensor, add: bool) -> None:
    """Write `value` into `target`, or add it, in the target's dtype."""
    if add:
        target.add_(value)
    else:
        target.copy_(value)
