"""Rows to their experts and back, as autograd functions of their own: around products that others come between.

    ToExperts      rows [M, D] -> expert rows [R, D]        and its transpose
    FromExperts    expert rows [R, D] -> sums of weight * row [M, D]

Legend: M rows, K slots per row, R expert rows, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import once_differentiable
from trimtab.experts.matrix import row_dot
from trimtab.experts.plan import ExpertPlan, slot_grads, slot_weights
from trimtab.kernels.rows import combine_rows, gather_padded


class ToExperts(Function):
    """Rows [M, D] -> expert rows [R, D], once for each kept slot; zeros in padding. `back`: its transpose, the sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: ExpertPlan, back: bool) -> Tensor:
        ctx.plan, ctx.back = plan, back
        return _moved(rows, plan, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return _moved(d.contiguous(), ctx.plan, not ctx.back), None, None


def _moved(rows: Tensor, plan: ExpertPlan, back: bool) -> Tensor:
    return combine_rows(rows, plan.row_csr) if back else gather_padded(rows, plan.row_R)


class FromExperts(Function):
    """Expert rows [R, D] -> sums of weight * row [M, D], in the order of a row's slots; padding is not read.

    Backward: weight * gradient, and a dot product for the weights, for which the experts' outputs are kept. Products
    and sums are taken in the weights' dtype at least, which is that of the result.
    """

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, w_MK: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(out_RD, w_MK)
        weighted_RD = out_RD.to(torch.promote_types(out_RD.dtype, w_MK.dtype)).mul(slot_weights(w_MK, plan))
        return combine_rows(weighted_RD, plan.row_csr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor, Tensor, None]:
        out_RD, w_MK = ctx.saved_tensors
        dy_RD = gather_padded(dy_MD, ctx.plan.row_R)
        dw_MK = slot_grads(row_dot(out_RD, dy_RD).to(w_MK.dtype), ctx.plan, w_MK)
        return dy_RD.mul(slot_weights(w_MK, ctx.plan)).to(out_RD.dtype), dw_MK, None
