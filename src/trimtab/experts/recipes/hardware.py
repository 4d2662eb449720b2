"""The real FP8 row-wise products on Hopper: `torch._scaled_grouped_mm`, the kernel of scaled_grouped_mm.

    forward   y[segment i]  = x[segment i] @ w[i]              x [R, A] by rows, w [e, A, B] by columns
    dgrad     dx[segment i] = dy[segment i] @ w[i]^T           dy [R, B] by rows, w^T [e, B, A] by columns
    wgrad     dw[i]         = x[segment i]^T @ dy[segment i]   x^T [A, R] by rows, dy [R, B] by columns

The kernel wants its left operand row-major, its right one column-major, the scale of each row or column of each in
float32, the ends of the segments in int32, and gives bfloat16. This function, of torch 2.7 and later, and not the
public `torch.nn.functional.scaled_grouped_mm` over the same kernel: it is the one that torch describes to the meta
device, so that shapes, strides, dtypes and scales are checked without a GPU.

What has been run: the operands, equal to the emulation's bit for bit, and the calls on the meta device, which checks
what the kernel checks. What has not: the kernel itself. No GPU took part in writing this file. Untested as well:
whether a segment of no rows leaves dw uninitialised (assumed so, and zeroed), and the product's last bits.

Legend: R expert rows, e experts, A in features, B out features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.experts.recipes.formats import E4M3
from trimtab.experts.recipes.fp8_rowwise import FP8RowwiseState


def rowwise_forward(state: FP8RowwiseState, x_RA: Tensor, w_eAB: Tensor, offsets_e: Tensor) -> Tensor:
    """y [R, B] in bfloat16, zero in the padding."""
    x = state.quantise_rows(x_RA, offsets_e, "row", "activation")
    w = state.quantise_weight(w_eAB, "in")
    return _by_rows(x.values, _by_columns(w.values), x.scale[:, 0], w.scale[:, 0, :], offsets_e)


def rowwise_dgrad(state: FP8RowwiseState, dy_RB: Tensor, w_eAB: Tensor, offsets_e: Tensor) -> Tensor:
    """dx [R, A] in bfloat16, zero in the padding."""
    dy = state.quantise_rows(dy_RB, offsets_e, "row", "gradient")
    w = state.quantise_weight(w_eAB, "out")
    return _by_rows(dy.values, _by_columns(w.values.mT), dy.scale[:, 0], w.scale[:, :, 0], offsets_e)


def rowwise_wgrad(state: FP8RowwiseState, x_RA: Tensor, dy_RB: Tensor, offsets_e: Tensor) -> Tensor:
    """dw [e, A, B] in bfloat16, zero for an expert without rows."""
    x = state.quantise_rows(x_RA, offsets_e, "column", "activation")
    dy = state.quantise_rows(dy_RB, offsets_e, "column", "gradient")
    left = _stored(x.values.t()).contiguous()
    dw = _call(left, _by_columns(dy.values), x.scale.reshape(-1), dy.scale.reshape(-1), offsets_e)
    empty_e = offsets_e[1:] == offsets_e[:-1]
    return dw.masked_fill(empty_e[:, None, None], 0)


def _by_rows(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets_e: Tensor) -> Tensor:
    y = _call(_stored(left), right, left_scale, right_scale, offsets_e)
    index_R = torch.arange(y.shape[0], device=y.device)
    return y.masked_fill((index_R >= offsets_e[-1])[:, None], 0)  # the kernel leaves those rows as they were


def _call(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets_e: Tensor) -> Tensor:
    y: Tensor = torch._scaled_grouped_mm(
        left,
        right,
        left_scale.contiguous(),
        right_scale.contiguous(),
        offs=offsets_e[1:].int(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,  # sums in float32 throughout
    )
    return y


def _stored(values: Tensor) -> Tensor:
    return values.to(E4M3.dtype)


def _by_columns(values: Tensor) -> Tensor:
    """The same matrix, or stack of them, with its columns contiguous."""
    return _stored(values).mT.contiguous().mT
