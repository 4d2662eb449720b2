"""From the largest magnitude of a block to its scale. `decode` is what is stored: x ~ value * decode.

    float     s = largest / amax, decode = 1 / s, both float32; a power of two on request    (arXiv 2209.05433)
    E8M0      decode = 2 ** (floor(log2 amax) - emax)                                        (OCP MX v1.0, 6.3)
    E4M3      decode = E4M3(amax / 6 / g) * g with one float32 g per tensor                  (NVFP4, arXiv 2509.25149)

Where a block is all zeros the float scale is 1 and the others are the smallest of their format: its values are zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.recipes.formats import E2M1, E4M3, ElementFormat, floor_log2, power_of_two, round_to

# Above this a scale's inverse would be subnormal, which some devices flush.
LARGEST_SCALE = 2.0**126
BEYOND_FLOAT32 = 2.0**128


@dataclass(frozen=True)
class Scale:
    """decode: multiplies a stored value. encode: multiplies x before it is rounded. Same shape, float32."""

    decode: Tensor
    encode: Tensor

    def view(self, *shape: int) -> Scale:
        """Both in another shape."""
        return Scale(self.decode.view(*shape), self.encode.view(*shape))


def float_scale(amax: Tensor, form: ElementFormat, *, exact: bool = False, margin: int = 0) -> Scale:
    """A float32 scale that puts `amax` at the largest value of `form`, over 2 ** margin.

    Headroom ends where float32 does: nothing saturates for that, and the scale's inverse stays finite.

    Args:
        amax: float32, >= 0 and finite.
        form: the element format.
        exact: round the scale down to a power of two, so that scaling itself loses nothing.
        margin: powers of two of headroom.
    """
    scale = (form.largest * 2.0**-margin / amax).clamp(form.largest / BEYOND_FLOAT32, LARGEST_SCALE)
    scale = torch.where(amax > 0, scale, 1.0)
    if exact:
        scale = power_of_two(floor_log2(scale))
    return Scale(decode=scale.reciprocal(), encode=scale)


def e8m0_scale(amax: Tensor, form: ElementFormat, *, ceil: bool = False) -> Scale:
    """A power of two from 2 ** -127 to 2 ** 127.

    floor (OCP MX v1.0): 2 ** (floor(log2 amax) - emax), with emax the exponent of the largest value of `form`. What
    lies between that value and 2 ** (emax + 1) saturates.
    ceil: the least power of two with which nothing saturates, 2 ** ceil(log2(amax / largest)).
    """
    exponent = floor_log2(amax) - (math.frexp(form.largest)[1] - 1)
    if ceil:
        # amax = f * 2 ** floor(log2 amax) saturates when f is above the largest value's own fraction.
        over = amax > form.largest * power_of_two(exponent)
        exponent = exponent + over.to(torch.int32)
    exponent = torch.where(amax > 0, exponent, -127).clamp(-127, 127)
    return Scale(decode=power_of_two(exponent), encode=power_of_two(-exponent))


def tensor_scale(amax: Tensor) -> Tensor:
    """NVFP4's float32 scale g of a tensor: amax / (6 * 448), so that the largest block scale is 448; 1 for zeros."""
    scale = (amax / (E2M1.largest * E4M3.largest)).clamp(min=1 / LARGEST_SCALE)
    return torch.where(amax > 0, scale, 1.0)


def e4m3_scale(amax: Tensor, tensor: Tensor) -> tuple[Tensor, Scale]:
    """NVFP4's block scales on the E4M3 grid, and what they come to together with the tensor's scale.

    Args:
        amax: of each block, float32.
        tensor: g of the tensor each block is in, broadcastable to amax.

    A block too small for the smallest E4M3 value has scale 0 and comes out as zeros, as it does in hardware.
    """
    stored = round_to(amax / E2M1.largest / tensor, E4M3)
    decode = stored * tensor
    encode = torch.where(decode > 0, decode.reciprocal().clamp(max=LARGEST_SCALE), 0.0)  # of a subnormal it is infinite
    return stored, Scale(decode=decode, encode=encode)
