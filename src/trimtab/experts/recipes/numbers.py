"""Element formats, rounding to them, and the scale of a block from its largest magnitude.

    E4M3   1.4.3, bias 7, no infinity, largest 448      (arXiv 2209.05433; OCP OFP8)
    E5M2   1.5.2, bias 15, largest 57344                (same)
    E2M1   1.2.1, bias 1, largest 6                     (OCP Microscaling Formats v1.0)

Rounding is to the nearest value, ties to even, saturating, or stochastic. One arithmetic serves all three, because
torch's casts differ in what they make of values that do not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_SCALE = 2.0**126
"""Above this a scale's inverse would be subnormal, which some devices flush."""


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
E5M2 = ElementFormat(
    name="E5M2", mantissa=2, min_exponent=-14, largest=57344.0, dtype=torch.float8_e5m2, has_inf=True
)  # fmt: skip
E2M1 = ElementFormat(name="E2M1", mantissa=1, min_exponent=0, largest=6.0, dtype=torch.float4_e2m1fn_x2)


def power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent in float32, exactly, for integers from -127 to 127; others are clamped to that range."""
    exponent = exponent.to(torch.int32).clamp(-127, 127)
    normal = (exponent + 127) << 23
    return torch.where(exponent == -127, 1 << 22, normal).to(torch.int32).view(torch.float32)


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2 |x|) as int32, exactly, of float32; for zero and what float32 holds as subnormal, -127."""
    return ((x.contiguous().view(torch.int32) >> 23) & 0xFF) - 127


def round_to(x: Tensor, form: ElementFormat, noise: Tensor | None = None) -> Tensor:
    """The value of `form` nearest to each x, in float32; ties go to the even mantissa, what is too large saturates.

    Args:
        x: float32, any shape. NaN stays NaN.
        form: the format.
        noise: uniform in [0, 1), of x's shape. If given, x goes to one of its two neighbors, up with the probability
            that makes the mean right (arXiv 1502.02551); what the format holds stays as it is.
    """
    step = power_of_two(floor_log2(x).clamp(min=form.min_exponent) - form.mantissa)
    scaled = x / step  # exact: a power of two, and nothing that matters underflows
    if noise is None:
        rounded = scaled.round()
    else:
        below = scaled.floor()
        rounded = (below + (scaled - below > noise)).copysign(scaled)
    return (rounded * step).clamp(-form.largest, form.largest)


def encode(x: Tensor, multiplier: Tensor, form: ElementFormat, noise: Tensor | None = None) -> Tensor:
    """`x * multiplier` on the grid of `form`. NaN gives NaN, Inf gives Inf where the format has one, else NaN."""
    on_grid = round_to((x * multiplier).clamp(-form.largest, form.largest), form, noise)
    return torch.where(x.isfinite(), on_grid, x if form.has_inf else torch.nan)


@dataclass(frozen=True)
class Scale:
    """float32, of one shape. decode: multiplies a stored value. encode: multiplies x before it is rounded.

    stored: what the hardware holds per block, where that is not `decode`.
    """

    decode: Tensor
    encode: Tensor
    stored: Tensor | None = None


def float_scale(amax: Tensor, form: ElementFormat, *, exact: bool = False, margin: int = 0) -> Scale:
    """A float32 scale that puts `amax` at the largest value of `form` over 2 ** margin; 1 for zeros.

    exact: rounded down to a power of two, so that scaling itself loses nothing.
    """
    scale = (form.largest * 2.0**-margin / amax).clamp(form.largest / 2.0**128, LARGEST_SCALE)
    scale = torch.where(amax > 0, scale, 1.0)
    if exact:
        scale = power_of_two(floor_log2(scale))
    return Scale(decode=scale.reciprocal(), encode=scale)


def e8m0_scale(amax: Tensor, form: ElementFormat, *, ceil: bool = False) -> Scale:
    """A power of two from 2 ** -127 to 2 ** 127, the smallest for zeros.

    floor (OCP MX v1.0, 6.3): 2 ** (floor(log2 amax) - emax); values above the largest of `form` saturate.
    ceil (arXiv 2506.08027): the least power of two with which nothing saturates.
    """
    exponent = floor_log2(amax) - (math.frexp(form.largest)[1] - 1)
    if ceil:
        exponent = exponent + (amax > form.largest * power_of_two(exponent)).to(torch.int32)
    exponent = torch.where(amax > 0, exponent, -127).clamp(-127, 127)
    return Scale(decode=power_of_two(exponent), encode=power_of_two(-exponent))


def tensor_scale(amax: Tensor) -> Tensor:
    """NVFP4's float32 scale g of a tensor: amax / (6 * 448), so that the largest block scale is 448; 1 for zeros."""
    scale = (amax / (E2M1.largest * E4M3.largest)).clamp(min=1 / LARGEST_SCALE)
    return torch.where(amax > 0, scale, 1.0)


def e4m3_scale(amax: Tensor, tensor: Tensor) -> Scale:
    """NVFP4's block scale E4M3(amax / 6 / g), times g. A block too small for the smallest E4M3 value becomes zeros.

    tensor: g of the tensor that each block is in, broadcastable to amax.
    """
    stored = round_to(amax / E2M1.largest / tensor, E4M3)
    decode = stored * tensor
    inverse = torch.where(decode > 0, decode.reciprocal().clamp(max=LARGEST_SCALE), 0.0)  # of a subnormal infinite
    return Scale(decode=decode, encode=inverse, stored=stored)
