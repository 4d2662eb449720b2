"""A quantised tensor, and how the scales of blocks, of segments or of a whole make one.

Legend: R expert rows, e experts, A in features, B out features, C either width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trimtab.experts.recipes.blocks import Segments, block_amax, spread_blocks
from trimtab.experts.recipes.formats import ElementFormat, encode
from trimtab.experts.recipes.scales import Scale


@dataclass(frozen=True)
class Quantised:
    """values: float32 on the element format's grid. scale: as stored, compact. factor: it, broadcastable to values.

    `values.to(format.dtype)` is exact: those are the bytes the hardware reads.
    """

    values: Tensor
    scale: Tensor
    factor: Tensor

    def dequantised(self) -> Tensor:
        """values * factor, rounded once to float32."""
        return self.values * self.factor


def by_block(x: Tensor, rows: int, columns: int, form: ElementFormat, scale: Scale) -> Quantised:
    """x [..., R, C] with one scale [..., n, m] per block of `rows` x `columns`."""
    factor = spread_blocks(scale.decode, rows, columns, x)
    return Quantised(encode(x, spread_blocks(scale.encode, rows, columns, x), form), scale.decode, factor)


def by_segment(x_RC: Tensor, segments: Segments, form: ElementFormat, scale: Scale) -> Quantised:
    """x [R, C] with scales per segment: [e, 1] or [e, C]."""
    factor = segments.spread(scale.decode)
    return Quantised(encode(x_RC, segments.spread(scale.encode), form), scale.decode, factor)


def by_broadcast(x: Tensor, form: ElementFormat, scale: Scale) -> Quantised:
    """x with scales that broadcast to it."""
    return Quantised(encode(x, scale.encode, form), scale.decode, scale.decode)


def whole_amax(w_eAB: Tensor) -> Tensor:
    """Largest finite magnitude of each expert's matrix: [e, 1, 1]."""
    return block_amax(w_eAB, w_eAB.shape[1], w_eAB.shape[2])
