"""FP8 with row-wise scales through `torch.nn.functional.scaled_grouped_mm`, on Hopper.

Its left operand is row-major and its right one column-major, each vector that is contracted has a float32 scale, the
ends of the segments are int32 on the device. Two matrices contracted along the segments have a scale for each vector of
each segment, one segment after the other.

Legend: S expert rows, e experts, A in features, B out features, C either width, N the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.experts.recipes.engine import RawCall, TorchKernel
from trimtab.experts.recipes.quantised import Quantised
from trimtab.kernels.counted import count


def scaled_grouped_mm(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends_e: Tensor) -> Tensor:
    """torch's grouped product with row-wise scales, summed in float32 throughout: bfloat16."""
    count(left.shape[0], left.shape[1], right.shape[-1])
    rowwise = torch.nn.functional.ScalingType.RowWise
    y: Tensor = torch.nn.functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        left,
        right,
        left_scale,
        rowwise,
        right_scale,
        rowwise,
        offs=ends_e,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return y


class RowwiseKernel(TorchKernel):
    """See `engine.Kernel`.

    Args:
        call: what multiplies, given as (left [S, C], right [e, C, N], scales [S] and [e, N], ends [e]) or, for the
            weight gradient, (left [A, S], right [S, B], scales [e * A] and [e * B], ends [e]).
    """

    alignment = 16

    def __init__(self, call: RawCall = scaled_grouped_mm) -> None:
        super().__init__(call)

    def rows(self, quantised: Quantised) -> Tensor:
        return quantised.scale[:, 0].contiguous()

    def weight(self, quantised: Quantised, transpose: bool) -> Tensor:
        return quantised.scale.squeeze(2 if transpose else 1).contiguous()

    def columns(self, quantised: Quantised, offsets_e: Tensor) -> Tensor:
        return quantised.scale.reshape(-1)
