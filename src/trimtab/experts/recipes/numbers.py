"""Element formats, rounding to them, blocks of values that share a scale, and the scale of a block.

    E4M3   1.4.3, bias 7, no infinity, largest 448      (arXiv 2209.05433; OCP OFP8)
    E5M2   1.5.2, bias 15, largest 57344                (same)
    E2M1   1.2.1, bias 1, largest 6                     (OCP Microscaling Formats v1.0)

Legend: R rows, C columns, e experts, n blocks of rows, m blocks of columns. offsets_e: [e + 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST_SCALE = 2.0**126
"""Above this a scale's inverse would be subnormal, which some devices flush."""

ROWS_PER_STEP = 16
"""Every alignment is a multiple of it: so many rows belong to one segment."""


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """min_exponent: of normal values. dtype: torch's with these values; for E2M1 that is two to a byte."""

    name: str
    mantissa: int
    min_exponent: int
    largest: float
    dtype: torch.dtype
    has_inf: bool = False


E4M3 = ElementFormat(name="E4M3", mantissa=3, min_exponent=-6, largest=448.0, dtype=torch.float8_e4m3fn)
E5M2 = ElementFormat(name="E5M2", mantissa=2, min_exponent=-14, largest=57344.0, dtype=torch.float8_e5m2, has_inf=True)
E2M1 = ElementFormat(name="E2M1", mantissa=1, min_exponent=0, largest=6.0, dtype=torch.float4_e2m1fn_x2)


@dataclass(frozen=True)
class Scale:
    """Of blocks, float32. decode multiplies a stored value; encode multiplies x before it is rounded.

    stored: what the hardware holds per block, where that is not `decode`.
    """

    decode: Tensor
    encode: Tensor
    stored: Tensor | None = None


@dataclass(frozen=True)
class Encoded:
    """values: float32 on the format's grid. scale: as stored, one per block. factor: it, broadcastable to values.

    `values.to(format.dtype)` is exact: those are the bytes that the hardware reads.
    """

    values: Tensor
    scale: Tensor
    factor: Tensor

    def decoded(self) -> Tensor:
        """values * factor, rounded once to float32."""
        return self.values * self.factor


class Blocks:
    """Weights [e, A, B], or rows [R, C] in segments of which no block crosses a border.

    Only finite magnitudes count: a NaN or an Inf comes out in its own place and does not spoil the scale of others.

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
        amax = _amax(self.x, self.rows or 1, self.columns)
        return self._segment_amax(amax) if self.by_segment else amax

    def tensor_amax(self, amax: Tensor) -> Tensor:
        """Of the segment or matrix that each block is in, from each block's, of `ROWS_PER_STEP` rows at most: [n, 1] or
        [e, 1, 1]."""
        if self.offsets_e is None:
            return amax.amax((1, 2), keepdim=True)
        of_segment = self._segment_amax(amax.amax(1, keepdim=True), ROWS_PER_STEP // self.rows)
        return of_segment.index_select(0, self._owner_R[:: self.rows])

    def spread(self, values: Tensor) -> Tensor:
        """Each block's value for each of its elements, broadcastable to x."""
        r, c = self.x.shape[-2:]
        if self.by_segment:
            values = values.index_select(0, self._owner_R)
        elif self.rows > 1 and values.shape[-2] > 1:
            values = values.repeat_interleave(self.rows, -2)[..., :r, :]
        if self.columns > 1 and values.shape[-1] > 1:
            values = values.repeat_interleave(self.columns, -1)[..., :c]
        return values

    @cached_property
    def _owner_R(self) -> Tensor:
        """The expert of every row; the last expert for padding."""
        assert self.offsets_e is not None
        row_R, last = torch.arange(self.x.shape[0], device=self.x.device), self.offsets_e.shape[0] - 2
        return torch.searchsorted(self.offsets_e[1:].long(), row_R, right=True).clamp_(max=last)

    def _segment_amax(self, amax_nm: Tensor, per_step: int = ROWS_PER_STEP) -> Tensor:
        """From each row's, or from so many to a step, to each segment's: [e, m]; 0 where a segment is empty."""
        assert self.offsets_e is not None
        step_nm = _amax(amax_nm, per_step, 1)
        owner_nm = self._owner_R[::ROWS_PER_STEP, None].expand_as(step_nm)
        none_em = step_nm.new_zeros(self.offsets_e.shape[0] - 1, step_nm.shape[1])
        return none_em.scatter_reduce(0, owner_nm, step_nm, "amax")


def _amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """Largest finite |x| of each block of the last two axes, 0 where there is none: [..., R, C] -> [..., n, m]."""
    whole, short = x.abs().nan_to_num_(nan=0.0, posinf=0.0), (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows)
    whole = pad(whole, short) if any(short) else whole
    n, m = whole.shape[-2] // rows, whole.shape[-1] // columns
    return whole.reshape(*x.shape[:-2], n, rows, m, columns).amax((-3, -1))


def power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent in float32, exactly, for integers from -127 to 127; others are clamped to that range."""
    biased = (exponent.to(torch.int32).clamp(-127, 127) + 127) << 23
    return biased.clamp_(min=1 << 22).view(torch.float32)


def _power_below(x: Tensor) -> Tensor:
    """2 ** floor(log2 |x|), exactly, of float32; 0 of zero and of what float32 holds as subnormal."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def round_to(x: Tensor, form: ElementFormat, noise: Tensor | None = None) -> Tensor:
    """The value of `form` nearest to each float32 x; ties to even, what is too large saturates, NaN stays NaN.

    noise: uniform in [0, 1), of x's shape. If given, x goes to one of its two neighbors, up with the probability that
    makes the mean right (arXiv 1502.02551); what the format holds stays as it is.
    """
    x = x.clamp(-form.largest, form.largest)
    if noise is None and form is not E2M1:
        return x.to(form.dtype).float()
    step = _power_below(x).clamp_(min=2.0**form.min_exponent).mul_(2.0**-form.mantissa)
    scaled = x / step  # exact: a power of two, and nothing that matters underflows
    if noise is None:
        rounded = scaled.round_()
    else:
        below = scaled.floor()
        rounded = (below + (scaled - below > noise)).copysign(scaled)
    return rounded.mul_(step)


def encode(x: Tensor, multiplier: Tensor, form: ElementFormat, noise: Tensor | None = None) -> Tensor:
    """`x * multiplier` on the grid of `form`. NaN gives NaN, Inf gives Inf where the format has one, else NaN."""
    on_grid = round_to(x * multiplier, form, noise)
    return torch.where(x.isinf(), x, on_grid) if form.has_inf else on_grid.masked_fill_(x.isinf(), torch.nan)


def float_scale(amax: Tensor, form: ElementFormat, *, exact: bool = False, margin: int = 0) -> Scale:
    """A float32 scale that puts `amax` at the largest value of `form` over 2 ** margin; 1 for zeros.

    exact: rounded down to a power of two, so that scaling itself loses nothing.
    """
    scale = (form.largest * 2.0**-margin / amax).clamp_(form.largest / 2.0**128, LARGEST_SCALE)
    scale.masked_fill_(amax == 0, 1.0)
    if exact:
        scale = _power_below(scale)
    return Scale(decode=scale.reciprocal(), encode=scale)


def e8m0_scale(amax: Tensor, form: ElementFormat, *, ceil: bool = False) -> Scale:
    """A power of two from 2 ** -127 to 2 ** 127, the smallest for zeros.

    floor (OCP MX v1.0, 6.3): 2 ** (floor(log2 amax) - emax); values above the largest of `form` saturate.
    ceil (arXiv 2506.08027): the least power of two with which nothing saturates.
    """
    exponent = (amax.view(torch.int32) >> 23) - (126 + math.frexp(form.largest)[1])  # floor(log2 amax) - emax
    if ceil:
        exponent += amax > form.largest * power_of_two(exponent)
    return Scale(decode=power_of_two(exponent), encode=power_of_two(-exponent))


def tensor_scale(amax: Tensor) -> Tensor:
    """NVFP4's float32 scale g of a tensor: amax / (6 * 448), so that the largest block scale is 448; 1 for zeros."""
    scale = (amax / (E2M1.largest * E4M3.largest)).clamp_(min=1 / LARGEST_SCALE)
    return scale.masked_fill_(amax == 0, 1.0)


def e4m3_scale(amax: Tensor, tensor: Tensor) -> Scale:
    """NVFP4's block scale E4M3(amax / 6 / g), times g. A block too small for the smallest E4M3 value becomes zeros.

    tensor: g of the tensor that each block is in, broadcastable to amax.
    """
    stored = round_to(amax / E2M1.largest / tensor, E4M3)
    decode = stored * tensor
    inverse = decode.reciprocal().clamp_(max=LARGEST_SCALE).masked_fill_(decode == 0, 0.0)  # of a subnormal infinite
    return Scale(decode=decode, encode=inverse, stored=stored)
