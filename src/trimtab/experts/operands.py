"""What an operator of the expert MLP hands to a backend.

Legend: M rows, K slots per row, R expert rows, e local experts, D model dim, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimtab.experts.activations import Activation, activation_of
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.quantized import Codes
from trimtab.kernels.api import Backend


@dataclass(frozen=True)
class Thin:
    """An adapter's pair: a [e, r, in] and b [e, out, r], of any dtype and strides.

    u: scale x a^T [R, r], of what a forward multiplies: written there, if a backward may come, and read there.
    d_a, d_b: where a backward writes the pair's gradients, if they are wanted.
    """

    a: Tensor
    b: Tensor
    scale: float
    u: Tensor | None = None
    d_a: Tensor | None = None
    d_b: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def read(self, dtype: torch.dtype) -> Thin:
        """As it is multiplied."""
        return replace(self, a=self.a.to(dtype).contiguous(), b=self.b.to(dtype).contiguous())


@dataclass(kw_only=True)
class Operands:
    """x [M, D] in the dtype that is computed in, w [M, K] in float32 or wider, the parameters in the model's dtype.

    up: [e, 2, F, D], [e, I, D] or, with `transposed`, [e, D, I]. down: [e, D, F], or [e, F, D]. word: the activation's.
    codes: what up and down are codes of.
    """

    x: Tensor
    w: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    transposed: bool
    word: str
    plan: ExpertPlan
    kernels: Backend
    thin: tuple[Thin, Thin] | None = None
    codes: Codes | None = None

    @property
    def activation(self) -> Activation:
        return activation_of(self.word)

    @property
    def width(self) -> int:
        """I."""
        return width_of(self.up, self.transposed)

    @property
    def hidden(self) -> int:
        """F."""
        width = self.width
        return width // 2 if self.activation.gated else width

    def by_row(self, weight: Tensor) -> Tensor:
        """A weight, or a part of one, as [e, in, out]."""
        return weight if self.transposed else weight.transpose(1, 2)


@dataclass
class Targets:
    """Where the gradients of up, down and their biases are written, in the parameters' shapes; None: not wanted.

    adds: whether they are added to what is there.
    """

    each: tuple[Tensor | None, ...]
    adds: tuple[bool, ...]

    @classmethod
    def of(cls, out: Sequence[Tensor], wanted: Sequence[bool], adds: Sequence[bool]) -> Targets:
        """From the lists that operators take: `out` and `adds` have an entry for each one that is wanted."""
        buffers, flags = iter(out), iter(adds)
        return cls(
            tuple(next(buffers) if want else None for want in wanted),
            tuple(next(flags) if want else False for want in wanted),
        )


def width_of(up: Tensor, transposed: bool) -> int:
    """I."""
    return up.shape[1] * up.shape[2] if up.ndim == 4 else up.shape[2 if transposed else 1]


def row_dot(a_RF: Tensor, b_RF: Tensor) -> Tensor:
    """Row-wise dot products in at least float32: [R]."""
    return (a_RF * b_RF).sum(-1, dtype=torch.promote_types(a_RF.dtype, torch.float32))
