"""Experts split over F on several ranks: every rank of the group sees the rows of all, and gives a part of the sum.

It is one more route, whose map sends each row to every rank, so `Dispatch` and `Combine` carry it: the parts come back
and are summed in the order of ranks, in float32 at least. Numbers of rows may differ and be zero.

Legend: M rows of this rank, K slots per row, P ranks of the group, D model dim.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import not_in_graphs, once_differentiable
from trimtab.dispatch import handshake
from trimtab.dispatch.handshake import CallId
from trimtab.dispatch.plan import RankPlan
from trimtab.dispatch.route import RankRoute
from trimtab.dispatch.transport import Transport, layer_frame
from trimtab.guard.guard import Guard
from trimtab.kernels.rows import Csr


class ExpertTensorGroup:
    """The ranks over which one layer's F is split. `layer`: that of the experts, for errors."""

    def __init__(self, transport: Transport, layer: str) -> None:
        self.transport, self.layer, self.calls = transport, f"{layer}.experts".lstrip("."), 0
        self.guard: Guard | None = getattr(transport, "guard", None)
        self.rank, self.size = transport.rank, transport.size
        self._frame = layer_frame(self.layer)

    @not_in_graphs
    def meet(
        self, x_MD: Tensor, ids_MK: Tensor, num_slots: int | None, *, grad: bool
    ) -> tuple[RankRoute, int | None, bool]:
        """Tell the group how many rows and slots this rank has, and whether they want gradients. Collective; one host
        sync.

        Returns the way to all ranks and back, how many slots all have where all know it, and whether any wants `grad`.

        Raises:
            DesyncError: the ranks are not in the same call, on every rank.
            PeerLost, PhaseTimeout: a rank did not come, where the guard waits.
        """
        (rows, width), ranks = x_MD.shape, self.size
        call = CallId(
            layer=self.layer, number=self.calls, experts=ranks, top_k=ids_MK.shape[1], width=width,
            fingerprint=f"{x_MD.dtype}, rows to every rank",
        )  # fmt: skip
        self.calls += 1
        rows_P = torch.full((ranks,), rows, dtype=torch.int64, device=x_MD.device)
        slots_P = torch.full_like(rows_P, -1 if num_slots is None else num_slots)
        message = handshake.fill(rows_P, slots_P, rows, 0, call, grad=grad)
        with nullcontext() if self.guard is None else self.guard.alone(self.layer, "count"):
            if self.guard is not None:
                self.guard.at(self.layer, "count", "forward", call.number)
            told = self._frame(self.transport.handshake, message)
        handshake.compare(told, self.rank, call, "count")
        slots = told.split_sizes(handshake.SLOTS)
        route = RankRoute(
            transport=self.transport, guard=self.guard, run=self._frame, plan=_to_every_rank(rows, ranks, x_MD.device),
            rows=told.split_sizes(handshake.ROWS), slots=slots, call=call,
            tokens=tuple(said[handshake.TOKENS] for said in told.received), announced=False,
        )  # fmt: skip
        known = None if min(slots.incoming) < 0 else sum(slots.incoming)
        return route, known, any(said[handshake.GRAD] for said in told.received)


def _to_every_rank(rows: int, ranks: int, device: torch.device) -> RankPlan:
    copies = torch.arange(rows * ranks, device=device)
    indptr = torch.arange(0, rows * ranks + 1, ranks, device=device)
    token_csr = Csr(indices=copies.view(ranks, rows).T.reshape(-1), indptr=indptr)
    return RankPlan(row_token_M=copies % max(rows, 1), token_csr=token_csr, slot_csr=None)


class FirstRankBias(Function):
    """A bias that all ranks hold, as it is on the group's rank 0 and zeros elsewhere: the sum has it once.

    Every rank sees the gradients of all rows, so each computes the bias's whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, rank: int) -> Tensor:
        return bias.clone() if rank == 0 else torch.zeros_like(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d, None
