"""Which set of kernels is faster for a shape in bfloat16, as measured on a device: a table, not a guess.

`python -m benchmarks gpu` measures both sets. A shape that no line names on its device
takes "stock", PyTorch's own grouped GEMM. No line has been measured yet, so that is every shape.

Legend: D model dim, F expert hidden dim, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["stock", "triton"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One device and shape, with the tokens at which it was measured: milliseconds of a layer, forward + backward."""

    device: str
    dim: int
    hidden: int
    experts: int
    top_k: int
    tokens: int
    stock_ms: float
    triton_ms: float

    @property
    def faster(self) -> Name:
        return "triton" if self.triton_ms < self.stock_ms else "stock"


TABLE: tuple[Measured, ...] = ()


def faster(device: str, dim: int, hidden: int, *, table: tuple[Measured, ...] = TABLE) -> Name:
    """The faster set of kernels for experts of `dim` x `hidden` on the device of that name, "stock" if not measured."""
    found = [m.faster for m in table if (m.device, m.dim, m.hidden) == (device, dim, hidden)]
    return "triton" if found and all(name == "triton" for name in found) else "stock"
