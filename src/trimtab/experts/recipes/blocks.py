"""An operand cut into blocks that share a scale: their largest magnitudes, and back to elements.

Only finite magnitudes count: a NaN or an Inf comes out in its own place and does not spoil the scale of others.

Legend: R rows, C columns, e experts, n blocks of rows, m blocks of columns. offsets_e: [e + 1].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS_PER_STEP = 16
"""Every alignment is a multiple of it: so many rows belong to one segment."""


def block_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """Largest finite |x| of each `rows` x `columns` block of the last two axes: [..., R, C] -> [..., n, m].

    Blocks at the far edges may be cut short; a block of nothing but zeros or non-finite values has 0.
    """
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=0.0)
    whole = pad(magnitude, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    n, m = whole.shape[-2] // rows, whole.shape[-1] // columns
    return whole.view(*x.shape[:-2], n, rows, m, columns).amax((-3, -1))


class Blocks:
    """Weights [e, A, B], or rows [R, C] in segments of which no block crosses a border.

    Args:
        x: weights or rows, any floating dtype.
        rows, columns: of a block; 0 stands for all of a segment or matrix.
        offsets_e: where the segments of rows begin, and the end of the last; multiples of `ROWS_PER_STEP`, on x's
            device, not read on the host. Rows behind the last are taken as zeros. None for weights.
    """

    def __init__(self, x: Tensor, rows: int, columns: int, offsets_e: Tensor | None) -> None:
        self.x, self.rows, self.columns, self.offsets_e = x.float(), rows, columns or x.shape[-1], offsets_e
        self.by_segment = offsets_e is not None and rows == 0
        if offsets_e is None:
            self.rows = rows or x.shape[-2]
        else:
            index_R = torch.arange(x.shape[0], device=x.device)
            self.x = self.x.masked_fill((index_R >= offsets_e[-1])[:, None], 0)

    def amax(self) -> Tensor:
        """Of each block: [e, m] for whole segments, [n, m] for others of rows, [e, n, m] for weights."""
        if self.by_segment:
            return self._segment_amax(block_amax(self.x, 1, self.columns))
        return block_amax(self.x, self.rows, self.columns)

    def tensor_amax(self) -> Tensor:
        """Of the segment or matrix that each block is in: [e, 1], [n, 1] or [e, 1, 1]."""
        if self.offsets_e is None:
            return block_amax(self.x, self.x.shape[1], self.x.shape[2])
        of_segment = self._segment_amax(block_amax(self.x, 1, self.x.shape[1]))
        return of_segment if self.by_segment else of_segment.index_select(0, self._owner(self.rows))

    def spread(self, values: Tensor) -> Tensor:
        """Each block's value for each of its elements, broadcastable to x."""
        r, c = self.x.shape[-2:]
        if self.by_segment:
            values = values.index_select(0, self._owner(1))
        elif self.rows > 1 and values.shape[-2] > 1:
            values = values.repeat_interleave(self.rows, -2)[..., :r, :]
        if self.columns > 1 and values.shape[-1] > 1:
            values = values.repeat_interleave(self.columns, -1)[..., :c]
        return values

    def _owner(self, rows_per_entry: int) -> Tensor:
        """The expert of every `rows_per_entry`-th row; the last expert for padding."""
        assert self.offsets_e is not None
        first = torch.arange(0, self.x.shape[0], rows_per_entry, device=self.x.device)
        last = self.offsets_e.shape[0] - 2
        return torch.searchsorted(self.offsets_e[1:].long(), first, right=True).clamp(max=last)

    def _segment_amax(self, amax_Rm: Tensor) -> Tensor:
        """From each row's to each segment's: [e, m]; 0 where a segment is empty."""
        assert self.offsets_e is not None
        step_nm = block_amax(amax_Rm, ROWS_PER_STEP, 1)
        owner_nm = self._owner(ROWS_PER_STEP)[:, None].expand_as(step_nm)
        return step_nm.new_zeros(self.offsets_e.shape[0] - 1, step_nm.shape[1]).scatter_reduce(
            0, owner_nm, step_nm, "amax"
        )
