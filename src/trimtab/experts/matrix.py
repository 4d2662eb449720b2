"""A weight as it is multiplied, [e, in, out] in the rows' dtype, and the blocks of rows in which it is.

Legend: e experts, A and B widths, R rows, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trimtab.experts.weight import GroupedWeight
from trimtab.kernels.api import Backend, Block
from trimtab.kernels.tensor_checks import no_values

TOGETHER, AT_ONCE = 256, 2048
"""Rows in all of the groups that may share a block: the calls between products cost more than the work. The second
where one call takes all."""


def blocks_of(
    kernels: Backend, offsets_e: Tensor, rows: int, dtype: torch.dtype, *weights: GroupedWeight,
    low_precision: bool = False, together: int = TOGETHER, at_once_rows: int = AT_ONCE,
) -> Iterator[Block]:  # fmt: skip
    """The blocks that rows and weights are worked on in, the same in the forward and in the backward: whole under a
    recipe, one group each where a weight has a format of its own or lies in a tensor for each group."""
    if low_precision:
        return kernels.blocks(offsets_e, rows, rows + 1)
    if any(weight.format or not weight.stacked for weight in weights):
        return kernels.blocks(offsets_e, rows)
    from trimtab.kernels.compiled import at_once

    many = at_once(kernels, *(weight.values[0] for weight in weights), dtype=dtype)
    return kernels.blocks(offsets_e, rows, at_once_rows if many else together)


def joined(weight: Tensor) -> Tensor:
    """A weight [e, 2, F, A] of a gate and up as [e, 2F, A]; others as they are."""
    return weight.flatten(1, 2) if weight.ndim == 4 else weight


def by_row(weight_eBA: Tensor, transposed: bool) -> Tensor:
    """A weight, or a part of one, as [e, in, out]."""
    return weight_eBA if transposed else weight_eBA.transpose(1, 2)


def with_rows(offsets_e: Tensor) -> list[slice] | None:
    """The experts whose segments have rows, in runs of neighbours; None where the host cannot tell at once."""
    if offsets_e.device.type != "cpu" or no_values(offsets_e.device):
        return None
    runs: list[slice] = []
    for expert in offsets_e.diff().nonzero().flatten().tolist():
        start = runs.pop().start if runs and runs[-1].stop == expert else expert
        runs.append(slice(start, expert + 1))
    return runs


def cast(weight_eAB: Tensor, dtype: torch.dtype, kernels: Backend, runs: Sequence[slice] | None = None) -> Tensor:
    """The weight itself where it has `dtype`, else a copy: of the experts in `runs`, the others' memory not set."""
    if weight_eAB.dtype == dtype:
        return weight_eAB
    made = kernels.empty_like(weight_eAB, dtype)
    for run in [slice(None)] if runs is None else runs:
        made[run].copy_(weight_eAB[run])
    return made


def row_dot(a_RF: Tensor, b_RF: Tensor) -> Tensor:
    """Row-wise dot products in at least float32: [R]."""
    return (a_RF * b_RF).sum(-1, dtype=torch.promote_types(a_RF.dtype, torch.float32))
