"""Experts that are exact: expert i turns a row x into scale[i] * x + shift[i], all small whole numbers.

They run as `trimtab.experts.mlp` does, on the same plan and kernels, with NaN in every padding row.

Legend: M rows, K slots per row, R expert rows, e local experts, D width.
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

NAN = float("nan")


class LinearExperts(Function):
    """(x [M, D], weights [M, K]) -> each row's weighted sum over its experts [M, D]."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, w_MK: Tensor, plan: ExpertPlan, scale_e: Tensor, shift_eD: Tensor) -> Tensor:
        rows_R = torch.arange(plan.row_R.shape[0])
        expert_R = torch.searchsorted(plan.offsets_e[1:], rows_R, right=True).clamp_(max=scale_e.shape[0] - 1)
        padding_R1 = (plan.row_R < 0)[:, None]
        scale_R1 = scale_e.index_select(0, expert_R)[:, None]
        out_RD = gather_padded(x_MD, plan.row_R) * scale_R1 + shift_eD.index_select(0, expert_R)
        out_RD.masked_fill_(padding_R1, NAN)
        w_R1 = slot_weights(w_MK, plan).to(x_MD.dtype)
        ctx.plan, ctx.kept = plan, (out_RD, scale_R1, w_R1, padding_R1, w_MK)
        return combine_rows(out_RD, plan.row_csr, w_R1[:, 0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        plan, (out_RD, scale_R1, w_R1, padding_R1, w_MK) = ctx.plan, ctx.kept
        d_RD = gather_padded(dy_MD, plan.row_R)
        dw_MK = slot_grads(row_dot(out_RD, d_RD).to(w_MK.dtype), plan, w_MK)
        dx_RD = (d_RD * scale_R1 * w_R1).masked_fill_(padding_R1, NAN)
        return combine_rows(dx_RD, plan.row_csr), dw_MK, None, None, None
