"""Routing weights of slots to expert rows, and their gradients back: a 0/1 map and its transpose.

Legend: M rows, K slots per row, R expert rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.experts.plan import ExpertPlan


def slot_weights(w_MK: Tensor, plan: ExpertPlan) -> Tensor:
    """The routing weight of each expert row [R, 1]; 0 in padding."""
    w_N1 = torch.nn.functional.pad(w_MK.reshape(-1), (0, 1))  # the last one serves padding
    return w_N1[plan.slot_R][:, None]  # slot -1 is the last


def slot_grads(dw_R: Tensor, plan: ExpertPlan, w_MK: Tensor) -> Tensor:
    """Gradients of expert rows back to their slots [M, K]; 0 for dropped slots."""
    slots = w_MK.numel()
    d_N1 = dw_R.new_zeros(slots + 1)
    d_N1.scatter_(0, torch.where(plan.slot_R < 0, slots, plan.slot_R), dw_R)
    return d_N1[:slots].view_as(w_MK)
