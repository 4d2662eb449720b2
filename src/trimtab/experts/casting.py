"""Weights in autocast's dtype: copies that live for one pass. What is saved for the backward is the parameters, whose
memory others may want in between (FSDP2).

Legend: e experts, A and B widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.kernels.api import Backend
from trimtab.kernels.memory import no_values


def with_rows(offsets_e: Tensor) -> list[slice] | None:
    """The experts whose segments have rows, in runs of neighbours; None where the host cannot tell at once."""
    if offsets_e.device.type != "cpu" or no_values(offsets_e.device):
        return None
    runs: list[slice] = []
    for expert in offsets_e.diff().nonzero().flatten().tolist():
        if runs and runs[-1].stop == expert:
            runs[-1] = slice(runs[-1].start, expert + 1)
        else:
            runs.append(slice(expert, expert + 1))
    return runs


def cast(weight_eAB: Tensor, dtype: torch.dtype, kernels: Backend, runs: Sequence[slice] | None = None) -> Tensor:
    """The weight itself where it has `dtype`, else a copy: of the experts in `runs`, the others' memory not set."""
    if weight_eAB.dtype == dtype:
        return weight_eAB
    made = kernels.empty_like(weight_eAB, dtype)
    for run in [slice(None)] if runs is None else runs:
        made[run].copy_(weight_eAB[run])
    return made
