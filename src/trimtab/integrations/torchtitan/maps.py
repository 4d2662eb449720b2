"""What lies between the rows of a rank and the rows of its experts: a 0/1 map, and a weighted sum back.

    ToExperts    rows [M, D] -> expert rows [R, D], grouped by expert       backward: sum over a row's expert rows
    FromExperts  expert rows [R, D] -> sum of weight * row, per row [M, D]  backward: weight * gradient, and a dot

The experts in between are somebody else's, so their outputs are kept for the weights' gradients. Products and sums
are taken in float32 at least and rounded once per row.

Legend: M rows of this rank, K slots per row, R expert rows (with padding), D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import once_differentiable
from trimtab.dispatch.plan import ExpertPlan
from trimtab.experts.slots import row_dot, slot_grads, slot_weights
from trimtab.kernels.rows import combine_rows, gather_padded


class ToExperts(Function):
    """Each row, once for each of its kept slots; zeros in padding."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan = plan
        return gather_padded(rows_MD, plan.row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RD: Tensor) -> tuple[Tensor, None]:
        return combine_rows(d_RD.contiguous(), ctx.plan.row_csr), None


class FromExperts(Function):
    """The sum of a row's weighted expert rows, in the order of its slots; expert rows in padding are not read."""

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, w_MK: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(out_RD, w_MK)
        weighted_RD = out_RD.to(torch.promote_types(out_RD.dtype, w_MK.dtype)).mul(slot_weights(w_MK, plan))
        return combine_rows(weighted_RD, plan.row_csr).to(out_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor, Tensor, None]:
        out_RD, w_MK = ctx.saved_tensors
        dy_RD = gather_padded(dy_MD, ctx.plan.row_R)
        dw_MK = slot_grads(row_dot(out_RD, dy_RD).to(w_MK.dtype), ctx.plan, w_MK)
        return dy_RD.to(w_MK.dtype).mul(slot_weights(w_MK, ctx.plan)).to(out_RD.dtype), dw_MK, None
