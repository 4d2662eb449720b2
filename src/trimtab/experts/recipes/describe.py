"""What a recipe says of itself: what it stores, how far off it can be, and which real kernel does the same.

Errors of one element, x the value and q what it is quantised to, over blocks with amax = max |x|:

    |q - x| <= max(relative * |x|, block_floor * amax(block)) + tensor_floor * amax(tensor)

relative is u / (1 + u) for rounding to nearest, u half the distance from 1 to the next value; block_floor is half the
smallest positive value as the block's scale sees it. With stochastic rounding both are twice that or less.

Errors of a product, max |err| / max |ref| for standard normal operands: each of K terms has independent errors of
relative size r_a and r_b (root mean square), so that errors and products both grow with sqrt(K) and

    max |err| / max |ref|  ~  sqrt(r_a ** 2 + r_b ** 2)      stated with a factor of 2, for K >= 64

(The ratio of two maxima fluctuates, more so for small K: with K = 16 up to 2.5 times the right side was seen.)

A value with m mantissa bits in a binade [2**k, 2**(k+1)) has a uniform error with variance 4**(k - m) / 12 and a mean
square of 7 / 3 * 4**k: r = 2**-m * sqrt(3 / 7 / 12) = 0.19 * 2**-m. Stochastic rounding doubles the variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SAFETY = 2


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One operand as the hardware holds it.

    block: (rows, columns) that share a scale, for a product that contracts the columns; 0 stands for all there are.
    bits: per value, scales of blocks included, of a tensor whose widths are multiples of the block.
    """

    values: torch.dtype
    scales: torch.dtype
    block: tuple[int, int]
    bits: float


@dataclass(frozen=True, kw_only=True)
class Formats:
    """What a recipe stores of each operand."""

    activation: Stored
    weight: Stored
    gradient: Stored


@dataclass(frozen=True, kw_only=True)
class ElementBound:
    """See the module: how far a quantised element can be off."""

    relative: float
    block_floor: float
    tensor_floor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """elements of each operand; products: forward is x w, backward is dy w^T and x^T dy."""

    activation: ElementBound
    weight: ElementBound
    gradient: ElementBound
    forward: float
    backward: float


def product_bound(rms_a: float, rms_b: float) -> float:
    """2 * sqrt(a ** 2 + b ** 2)."""
    return float(SAFETY * (rms_a**2 + rms_b**2) ** 0.5)


def rms_error(mantissa: int) -> float:
    """Root mean square relative error of rounding to nearest with so many mantissa bits."""
    return float(2.0**-mantissa * (3 / 7 / 12) ** 0.5)
