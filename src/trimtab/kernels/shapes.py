"""Kernels for tensors without values: shapes, memory and FLOPs of a model before there is a machine for it.

Legend: R expert rows, e experts, A and B the widths of a GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.kernels.block import Block
from trimtab.kernels.counted import count
from trimtab.kernels.grouped import StockKernels


class ShapeKernels(StockKernels):
    """As "stock", but that products are counted and not computed, in any dtype and width."""

    name = "shapes"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        count(x_RA.shape[0], x_RA.shape[1], w_eAB.shape[2])
        return x_RA.new_empty(x_RA.shape[0], w_eAB.shape[2]) if out is None else out

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        count(a_RA.shape[1], a_RA.shape[0], b_RB.shape[1])
