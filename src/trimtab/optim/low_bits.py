"""Sixteen low bits beside a bfloat16 parameter: together a float32 value, for two bytes more.

    wide = (bits of the parameter << 16) + low        the parameter is `wide` rounded to nearest

Low bits of zero mean the parameter itself, so a state that begins needs no values of the parameter. Two bfloat16
numbers as near as each other: the parameter is the one of larger magnitude, where a cast takes the even one, for which
sixteen bits would not tell all values apart.

In an optimizer's state the bits lie in a tensor of bfloat16, which no one reads as numbers: no backend gathers int16.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widen(param: Tensor, low: Tensor) -> Tensor:
    """float32 of local tensors of one shape, param bfloat16 and low of any dtype of two bytes; new memory."""
    return (
        param.detach().view(torch.int16).int().bitwise_left_shift_(16).add_(low.view(torch.int16)).view(torch.float32)
    )


def write_back(wide: Tensor, param: Tensor, low: Tensor) -> None:
    """Put float32 `wide` into param and low: `widen` then gives `wide` in every bit, but a NaN's, which stays one."""
    param.detach().copy_(wide)
    bits = param.detach().view(torch.int16)
    rest = wide.view(torch.int32) - bits.int().bitwise_left_shift_(16)
    bits.add_((rest == 32768) & ~param.isnan())  # a tie that the cast took down to the even one
    low.view(torch.int16).copy_(rest)  # and 32768 is -32768 in int16
