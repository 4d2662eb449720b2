"""Where scales lie: rectangular blocks, and segments of rows. Largest magnitudes of each, and back to elements.

Only finite magnitudes count: a NaN or an Inf comes out in its own place and does not spoil the scale of others.

Legend: R rows, C columns, e experts, n blocks of rows, m blocks of columns. offsets_e: [e + 1].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.errors import InputError

ROWS_PER_STEP = 16  # every alignment is a multiple: a step of rows belongs to one segment


def block_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """Largest finite |x| of each `rows` x `columns` block of the last two axes: [..., R, C] -> [..., n, m].

    Blocks at the far edges may be cut short; a block of nothing but zeros or non-finite values has 0.
    """
    r, c = x.shape[-2:]
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=0.0)
    whole = pad(magnitude, (0, -c % columns, 0, -r % rows))
    n, m = whole.shape[-2] // rows, whole.shape[-1] // columns
    return whole.view(*x.shape[:-2], n, rows, m, columns).amax((-3, -1))


def spread_blocks(scale: Tensor, rows: int, columns: int, like: Tensor) -> Tensor:
    """Each block's number for each of its elements: [..., n, m] -> the shape of `like`, [..., R, C]."""
    r, c = like.shape[-2:]
    return scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :r, :c]


class Segments:
    """Rows cut into one segment per expert, the rest padding.

    Args:
        rows: R.
        offsets_e: [e + 1], integers, on the rows' device, never read on the host. The first is 0.
        alignment: what all offsets are multiples of; a multiple of ROWS_PER_STEP.
    """

    def __init__(self, rows: int, offsets_e: Tensor, alignment: int) -> None:
        if offsets_e.dim() != 1 or offsets_e.shape[0] < 2:
            raise InputError(f"offsets of shape {tuple(offsets_e.shape)}: expected [experts + 1] with experts >= 1")
        if alignment % ROWS_PER_STEP:
            raise InputError(f"alignment {alignment} is not a multiple of {ROWS_PER_STEP}")
        self.rows, self.offsets_e, self.count = rows, offsets_e, offsets_e.shape[0] - 1

    def clean(self, x_RC: Tensor) -> Tensor:
        """x in float32, zero in the padding, whatever lies there."""
        if x_RC.dim() != 2 or x_RC.shape[0] != self.rows:
            raise InputError(f"expected [{self.rows}, width], got shape {tuple(x_RC.shape)}")
        index_R = torch.arange(self.rows, device=x_RC.device)
        return x_RC.float().masked_fill((index_R >= self.offsets_e[-1])[:, None], 0)

    def owner(self, rows_per_entry: int) -> Tensor:
        """The expert of every `rows_per_entry`-th row; the last expert for padding. [ceil(R / rows_per_entry)]."""
        first = torch.arange(0, self.rows, rows_per_entry, device=self.offsets_e.device)
        return torch.searchsorted(self.offsets_e[1:].long(), first, right=True).clamp(max=self.count - 1)

    def column_amax(self, x_RC: Tensor) -> Tensor:
        """Largest finite |x| of each column of each segment: [e, C]; 0 where a segment is empty. x is clean."""
        step_nC = block_amax(x_RC, ROWS_PER_STEP, 1)
        owner_nC = self.owner(ROWS_PER_STEP)[:, None].expand_as(step_nC)
        return step_nC.new_zeros(self.count, x_RC.shape[1]).scatter_reduce(0, owner_nC, step_nC, "amax")

    def amax(self, x_RC: Tensor) -> Tensor:
        """Largest finite |x| of each segment: [e, 1]; 0 where it is empty. x is clean."""
        return self.column_amax(block_amax(x_RC, 1, x_RC.shape[1]))

    def spread(self, values_eC: Tensor) -> Tensor:
        """Each expert's row of values for each of its rows: [e, C] -> [R, C]."""
        return values_eC.index_select(0, self.owner(1))
