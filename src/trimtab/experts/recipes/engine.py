"""The three products on hardware: quantise, lay out as the kernel reads, multiply the bytes.

    forward   y[segment i]  = x[segment i] @ w[i]              x by rows        w contracted along in
    dgrad     dx[segment i] = dy[segment i] @ w[i]^T           dy by rows       w contracted along out
    wgrad     dw[i]         = x[segment i]^T @ dy[segment i]   x by columns     dy by columns

Tensor cores read FP8 with the contracted axis contiguous, on both sides. So all operands are laid out that way:
rows [S, C], weights [e, N, C] for an output of width N, columns [C, S], with S the rows filled up to a multiple of the
alignment that is not zero. The results are bfloat16.

Legend: R expert rows, S the same filled up, e experts, A in features, B out features, C either width, N the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.experts.recipes.base import Operands, RowsRole
from trimtab.experts.recipes.formats import E4M3
from trimtab.experts.recipes.quantised import Quantised
from trimtab.layout import align_up

RawCall = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Packed:
    """An operand as a kernel reads it: bytes of E4M3, scales in the kernel's layout."""

    values: Tensor
    scale: Tensor


class Kernel(Protocol):
    """One recipe's layout of scales, and its two multiplications. Reads nothing on the host.

    Neither result needs to be set where there is no row: not in the padding, not for a segment without rows.
    """

    alignment: int

    def rows(self, quantised: Quantised) -> Tensor:
        """The scales of rows that are contracted along C."""
        ...

    def weight(self, quantised: Quantised, transpose: bool) -> Tensor:
        """The scales of a weight [e, C, N]; with `transpose` of [e, N, C]."""
        ...

    def columns(self, quantised: Quantised, offsets_e: Tensor) -> Tensor:
        """The scales of rows [S, C] that are contracted along S."""
        ...

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        """rows [S, C] times weights [e, N, C]: [S, N]."""
        ...

    def by_groups(self, x: Packed, dy: Packed, offsets_e: Tensor) -> Tensor:
        """columns [A, S] times columns [B, S], segment by segment: [e, A, B]."""
        ...


class TorchKernel:
    """The multiplications of a `Kernel` by one call, as of torch's grouped product: it takes both, and the ends [e]."""

    def __init__(self, call: RawCall) -> None:
        self.call = call

    def by_rows(self, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
        return self.call(x.values, w.values.mT, x.scale, w.scale, offsets_e[1:].int())

    by_groups = by_rows


class Engine:
    """The three products over one kernel. `call` is the `call()` of the recipe's state."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def forward(self, call: Operands, x_RA: Tensor, w_eAB: Tensor, offsets_e: Tensor) -> Tensor:
        """[R, B] in bfloat16, zero in the padding."""
        x = call.quantise_rows(self._filled(x_RA), offsets_e, "row", "activation")
        w = call.quantise_weight(w_eAB, "in")
        right = Packed(self._stored(w.values.mT), self.kernel.weight(w, False))
        return self._rows(x, right, offsets_e)[: x_RA.shape[0]]

    def dgrad(self, call: Operands, dy_RB: Tensor, w_eAB: Tensor, offsets_e: Tensor) -> Tensor:
        """[R, A] in bfloat16, zero in the padding."""
        dy = call.quantise_rows(self._filled(dy_RB), offsets_e, "row", "gradient")
        w = call.quantise_weight(w_eAB, "out")
        right = Packed(self._stored(w.values), self.kernel.weight(w, True))
        return self._rows(dy, right, offsets_e)[: dy_RB.shape[0]]

    def columns(self, call: Operands, x_RC: Tensor, offsets_e: Tensor, role: RowsRole) -> Packed:
        """An operand of `wgrad`, one byte per value: quantised now, multiplied whenever it is wanted."""
        q = call.quantise_rows(self._filled(x_RC), offsets_e, "column", role)
        return Packed(self._stored(q.values.t()), self.kernel.columns(q, offsets_e))

    def wgrad(self, x: Packed, dy: Packed, offsets_e: Tensor) -> Tensor:
        """[e, A, B] in bfloat16, zero for a segment without rows."""
        dw = self.kernel.by_groups(x, dy, offsets_e)
        empty_e = offsets_e[1:] == offsets_e[:-1]
        return dw.masked_fill_(empty_e[:, None, None], 0)

    def _rows(self, q: Quantised, right: Packed, offsets_e: Tensor) -> Tensor:
        y = self.kernel.by_rows(Packed(self._stored(q.values), self.kernel.rows(q)), right, offsets_e)
        index_R = torch.arange(y.shape[0], device=y.device)
        return y.masked_fill_((index_R >= offsets_e[-1])[:, None], 0)

    def _filled(self, x_RC: Tensor) -> Tensor:
        alignment = self.kernel.alignment
        whole = max(align_up(x_RC.shape[0], alignment), alignment)  # no kernel is called with no rows
        return pad(x_RC, (0, 0, 0, whole - x_RC.shape[0]))

    def _stored(self, values: Tensor) -> Tensor:
        return values.to(E4M3.dtype).contiguous()
