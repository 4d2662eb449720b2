"""Where slots go, as the kernels that work it out hand it over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True)
class SlotPlaces:
    """What `trimtab.experts.plan.ExpertPlan` holds, as tensors."""

    slot_R: Tensor
    row_R: Tensor
    bag_index: Tensor
    bag_offsets: Tensor
    counts_e: Tensor
    offsets_e: Tensor
