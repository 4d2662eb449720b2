"""Element formats, and rounding to them: to the nearest value, ties to even, saturating; or stochastically.

    E4M3   1.4.3, bias 7, no infinity, largest 448      (arXiv 2209.05433; OCP OFP8)
    E5M2   1.5.2, bias 15, largest 57344                (same)
    E2M1   1.2.1, bias 1, largest 6                     (OCP Microscaling Formats v1.0)

One arithmetic serves all three, so that no cast's own treatment of what does not fit matters: torch 2.13 turns an
infinity into 448 when it casts to E4M3, and 65536 into an infinity when it casts to E5M2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """Sign, exponent, mantissa; subnormals; the largest exponent holds values too (E5M2 keeps it for Inf and NaN).

    dtype is torch's dtype with these values; for E2M1 that is two to a byte.
    """

    name: str
    bits: int
    mantissa: int
    min_exponent: int
    largest: float
    dtype: torch.dtype
    has_inf: bool = False

    @property
    def unit(self) -> float:
        """Half the distance from 1 to the next value: u."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def relative_error(self) -> float:
        """Largest |q(x) - x| / |x| over the normal range, rounding to nearest: u / (1 + u), met at a tie."""
        return self.unit / (1 + self.unit)

    @property
    def step(self) -> float:
        """Distance between subnormal values, the smallest positive value."""
        return float(2.0 ** (self.min_exponent - self.mantissa))


E4M3 = ElementFormat(
    name="E4M3", bits=8, mantissa=3, min_exponent=-6, largest=448.0, dtype=torch.float8_e4m3fn
)  # fmt: skip
E5M2 = ElementFormat(
    name="E5M2", bits=8, mantissa=2, min_exponent=-14, largest=57344.0, dtype=torch.float8_e5m2, has_inf=True
)
E2M1 = ElementFormat(
    name="E2M1", bits=4, mantissa=1, min_exponent=0, largest=6.0, dtype=torch.float4_e2m1fn_x2
)  # fmt: skip


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
        noise: uniform in [0, 1), of x's shape. If given, x goes to one of its two neighbours, up with the
            probability that makes the mean right (arXiv 1502.02551); what the format holds stays as it is.
    """
    step = power_of_two(floor_log2(x).clamp(min=form.min_exponent) - form.mantissa)
    scaled = x / step  # exact: a power of two, and nothing that matters underflows
    if noise is None:
        rounded = scaled.round()
    else:
        below = scaled.floor()
        rounded = below + (scaled - below > noise)
        rounded = rounded.copysign(scaled)
    return (rounded * step).clamp(-form.largest, form.largest)


def encode(x: Tensor, multiplier: Tensor, form: ElementFormat, noise: Tensor | None = None) -> Tensor:
    """`x * multiplier` on the grid of `form`. What is not finite stays visible in its own place.

    NaN gives NaN; Inf gives Inf where the format has one and NaN where not. A finite x never gives either.
    """
    on_grid = round_to((x * multiplier).clamp(-form.largest, form.largest), form, noise)
    return torch.where(x.isfinite(), on_grid, x if form.has_inf else torch.nan)
