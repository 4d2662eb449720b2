"""Products that PyTorch's FLOP counter does not see, shown to it.

`torch.utils.flop_counter.FlopCounterMode` counts operators by their formulas. C++ and Triton are no operators, and for
grouped GEMMs it has no formula: where nobody shows them, experts take no FLOPs at all.
"""

from __future__ import annotations

import torch

from trimtab.kernels.memory import modes

COUNTER = "torch.utils.flop_counter"


def count(rows: int, contracted: int, width: int) -> None:
    """Where FLOPs are counted, count a product [rows, contracted] x [contracted, width]: as an `mm` without values."""
    if any(mode.__module__ == COUNTER for mode in modes()):
        torch.mm(torch.empty(rows, contracted, device="meta"), torch.empty(contracted, width, device="meta"))
