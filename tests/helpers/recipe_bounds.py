"""What each recipe stores of its operands, and how far off it may be: the claims that tests and docs hold it to.

Errors of one element, x the value and q what it is quantized to, over blocks with amax = max |x|:

    |q - x| <= max(relative * |x|, block_floor * amax(block)) + tensor_floor * amax(tensor)

relative is u / (1 + u) for rounding to nearest, u half the distance from 1 to the next value; block_floor is half the
smallest positive value as the block's scale sees it. With stochastic rounding both are twice that or less.

Errors of a product, max |err| / max |ref| for standard normal operands: each of K terms has independent errors of
relative size r_a and r_b (root mean square), so that errors and products both grow with sqrt(K) and

    max |err| / max |ref|  ~  sqrt(r_a ** 2 + r_b ** 2)      stated with a factor of 2, for K >= 64

A value with m mantissa bits in a binade [2**k, 2**(k+1)) has a uniform error with variance 4**(k - m) / 12 and a mean
square of 7 / 3 * 4**k: r = 2**-m * sqrt(3 / 7 / 12) = 0.19 * 2**-m. Stochastic rounding doubles the variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trimtab.experts.recipes import MXFP8, NVFP4, FP8Delayed, Recipe
from trimtab.experts.recipes.base import Along, Role
from trimtab.experts.recipes.numbers import E2M1, E4M3, ElementFormat

SCALE_ERROR = 2.0**-21
"""Scales in float32 are off by at most this, and so are the products with them."""
RMS_SATURATION = (0.19 * 0.0059 * 0.14) ** 0.5
"""Of MXFP8's "floor", standard normal values: amax = 2 ** k * f saturates for f in (1.75, 2), in log2(2 / 1.75) = 19 %
of blocks, by a mean square of 0.0059 of its own, which is 14 % of a block's."""
RMS_LINE, RMS_SQUARE = 0.10, 0.115
"""Of NVFP4, from the steps 1/2, 1, 2 of E2M1 and the expected amax of a block: 1.77 standard deviations of 16 values,
2.8 of 256. Rounding to nearest; stochastically, sqrt(2) of it."""


ALL = 1 << 20
BLOCKS = {
    "fp8_delayed": ((ALL, ALL), (ALL, ALL)), "fp8_current": ((ALL, ALL), (ALL, ALL)),
    "fp8_rowwise": ((1, ALL), (ALL, 1)), "fp8_blockwise": ((1, 128), (128, 128)), "mxfp8": ((1, 32), (32, 1)),
    "nvfp4": ((1, 16), (16, 16)),
}  # fmt: skip
"""(rows, columns) that share a scale: of one segment's rows in the forward, of one expert's weight [in, out] there."""


def block_of(recipe: Recipe, role: Role, along: Along) -> tuple[int, int]:
    """For a product that contracts the other axis they are turned."""
    rows, columns = BLOCKS[recipe.name][role == "weight"]
    if role == "weight" and isinstance(recipe, NVFP4) and not recipe.square_weights:
        rows, columns = 16, 1
    return (columns, rows) if along in ("column", "out") else (rows, columns)


def unit(form: ElementFormat) -> float:
    """Half the distance from 1 to the next value: u."""
    return 2.0 ** -(form.mantissa + 1)


def relative_error(form: ElementFormat) -> float:
    """Largest |q(x) - x| / |x| over the normal range, rounding to nearest: met at a tie."""
    return unit(form) / (1 + unit(form))


def step(form: ElementFormat) -> float:
    """Distance between subnormal values, the smallest positive value."""
    return float(2.0 ** (form.min_exponent - form.mantissa))


@dataclass(frozen=True)
class ElementBound:
    """See above: how far a quantized element can be off."""

    relative: float
    block_floor: float
    tensor_floor: float = 0.0


def element_bound(recipe: Recipe, role: Role) -> ElementBound:
    """Delayed scaling's holds as long as magnitudes stay within a factor of 2 ** margin of the history."""
    form = recipe.form(role)
    if isinstance(recipe, NVFP4):
        # The block scale is off by E4M3's u / (1 + u), and below its normal range by half its smallest value; all of
        # amax may be lost to that. A stochastic value is off by less than a step: the whole of it, not half.
        stochastic = role == "gradient" and recipe.stochastic_gradients
        floor = step(E2M1) / 2 * (2 if stochastic else 1) / E2M1.largest * (1 + relative_error(E4M3))
        relative = 0.5 if stochastic else relative_error(E2M1)
        return ElementBound(relative, floor, step(E4M3) / 2 / E4M3.largest)
    if isinstance(recipe, MXFP8):
        if recipe.scale_rounding == "ceil":  # amax lands in (largest / 2, largest]
            return ElementBound(relative_error(form), step(form) / form.largest)
        top = 2.0 ** math.frexp(form.largest)[1]  # amax lands in [top / 2, top), and above `largest` it saturates
        return ElementBound(max(relative_error(form), 1 - form.largest / top), step(form) / top)
    headroom = 2.0 ** (recipe.margin if isinstance(recipe, FP8Delayed) else getattr(recipe, "power_of_two", False))
    return ElementBound(
        relative_error(form) + SCALE_ERROR, step(form) / 2 / form.largest * headroom * (1 + SCALE_ERROR)
    )


def _rms(recipe: Recipe, role: Role) -> float:
    if isinstance(recipe, NVFP4):
        if role == "weight":
            return RMS_SQUARE if recipe.square_weights else RMS_LINE
        return RMS_LINE * (2**0.5 if role == "gradient" and recipe.stochastic_gradients else 1)
    saturation = RMS_SATURATION if isinstance(recipe, MXFP8) and recipe.scale_rounding == "floor" else 0.0
    return math.hypot(2.0 ** -recipe.form(role).mantissa * (3 / 7 / 12) ** 0.5, saturation)


def product_bound(recipe: Recipe, rows: Role) -> float:
    """rows "activation": of the forward, x w. "gradient": of both products of the backward, dy w^T and x^T dy."""
    return 2 * math.hypot(_rms(recipe, rows), _rms(recipe, "weight"))


def scale_dtype(recipe: Recipe) -> torch.dtype:
    """What the scale of a block is stored in."""
    return {"mxfp8": torch.float8_e8m0fnu, "nvfp4": E4M3.dtype}.get(recipe.name, torch.float32)


def bits_per_value(recipe: Recipe) -> float:
    """Of activations, scales of blocks included; of a tensor whose widths are multiples of the block."""
    rows, columns = block_of(recipe, "activation", "row")
    bits = 4 if recipe.form("activation") is E2M1 else 8
    return bits + (8 * scale_dtype(recipe).itemsize / (rows * columns) if columns < ALL else 0)
