"""FP8 with blockwise scales through trimtab's own Triton kernels, on Hopper: torch has no grouped call of them.

Legend: S expert rows, e experts, A in features, B out features, C either width, N the other.
"""

from __future__ import annotations

from torch import Tensor

from trimtab.experts.recipes.engine import Packed, RawCall
from trimtab.experts.recipes.quantised import Quantised


def _rows(x_SC: Tensor, x_scale: Tensor, w_eNC: Tensor, w_scale: Tensor, offsets_e: Tensor) -> Tensor:
    from trimtab.kernels.fp8_blockwise import blockwise_rows  # needs Triton, which not every machine has

    return blockwise_rows(x_SC, x_scale, w_eNC, w_scale, offsets_e)


def _groups(x_AS: Tensor, x_scale: Tensor, dy_BS: Tensor, dy_scale: Tensor, offsets_e: Tensor) -> Tensor:
    from trimtab.kernels.fp8_blockwise import blockwise_groups

    return blockwise_groups(x_AS, x_scale, dy_BS, dy_scale, offsets_e)


class BlockwiseKernel:
    """See `engine.Kernel`.

    Args:
        rows, groups: what multiplies, as `trimtab.kernels.fp8_blockwise` describes its two functions.
    """

    alignment = 128

    def __init__(self, rows: RawCall = _rows, groups: RawCall = _groups) -> None:
        self.multiply_rows, self.multiply_groups = rows, groups

    def rows(self, quantised: Quantised) -> Tensor:
        return quantised.scale.contiguous()

    def weight(self, quantised: Quantised, transpose: bool) -> Tensor:
        return (quantised.scale if transpose else quantised.scale.mT).contiguous()

    def columns(self, quantised: Quantised, offsets_e: Tensor) -> Tensor:
        return quantised.scale.contiguous()

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return self.multiply_rows(x.values, x.scale, w.values, w.scale, offsets_e.long())

    def by_groups(self, x: Packed, dy: Packed, offsets_e: Tensor) -> Tensor:
        return self.multiply_groups(x.values, x.scale, dy.values, dy.scale, offsets_e.long())
