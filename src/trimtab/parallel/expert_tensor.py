"""Expert tensor parallelism: the ranks that split each expert's F see the rows of all, by one more route, whose map
sends each row to every rank. The parts come back and are summed in the order of ranks, in float32 at least.

Legend: M rows, K slots per row, D model dim, F hidden dim.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from trimtab.autograd import not_in_graphs
from trimtab.dispatch import facts
from trimtab.dispatch.exchange import count_message
from trimtab.dispatch.facts import CallId
from trimtab.dispatch.plan import RankPlan
from trimtab.dispatch.route import Combine, Dispatch, Dispatched, RankRoute, require_grad_if_any, wants_gradient
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
    def dispatch(self, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, num_slots: int | None) -> Dispatched:
        """The rows of all ranks of the group, on each; their outputs go home by `combine`. Collective, with a host sync
        in which the ranks exchange their numbers of rows and slots (-1: not known), and whether they want gradients.

        Raises:
            DesyncError: the ranks are not in the same call, on every rank.
            PeerLost, PhaseTimeout: a rank did not come, where the guard waits.
        """
        (rows, width), ranks, own = x_MD.shape, self.size, wants_gradient(x_MD, w_MK)
        call = CallId(
            layer=self.layer, number=self.calls, experts=ranks, top_k=ids_MK.shape[1], width=width,
            fingerprint=f"{x_MD.dtype}, rows to every rank",
        )  # fmt: skip
        self.calls += 1
        rows_P = torch.full((ranks,), rows, dtype=torch.int64, device=x_MD.device)
        slots = -1 if num_slots is None else num_slots
        values = {facts.ROWS: rows, facts.SLOTS: slots, facts.TOKENS: rows, facts.GRAD: own}
        message = count_message(rows_P, call, values)
        with nullcontext() if self.guard is None else self.guard.alone(self.layer, "count"):
            if self.guard is not None:
                self.guard.at(self.layer, "count", "forward", call.number)
            met = self._frame(self.transport.handshake, message)
        facts.compare(met, self.rank, call, "count")
        of_all = met.split_sizes(facts.SLOTS)
        route = RankRoute(
            transport=self.transport, guard=self.guard, run=self._frame, plan=_to_every_rank(rows, ranks, x_MD.device),
            rows=met.split_sizes(facts.ROWS), slots=of_all, call=call,
            tokens=tuple(theirs[facts.TOKENS] for theirs in met.received), agrees=False,
        )  # fmt: skip
        w_MK = require_grad_if_any(w_MK, any(theirs[facts.GRAD] for theirs in met.received), own)
        x, w, ids, sent = Dispatch.apply(route, x_MD, w_MK, ids_MK)  # type: ignore[no-untyped-call]
        known = None if min(of_all.incoming) < 0 else sum(of_all.incoming)
        return Dispatched(x_MD=x, ids_MK=ids, weights_MK=w, num_slots=known, route=route, sent=sent)

    def combine(self, y: Tensor, rows: Dispatched) -> Tensor:
        """Each rank's part of the outputs of `rows` -> their sums, for this rank's rows. Collective."""
        out: Tensor = Combine.apply(rows.route, y, rows.sent, None)  # type: ignore[no-untyped-call]
        return out


def _to_every_rank(rows: int, ranks: int, device: torch.device) -> RankPlan:
    sent_M = torch.arange(rows * ranks, device=device)
    indptr = torch.arange(0, rows * ranks + 1, ranks, device=device)
    token_csr = Csr(indices=sent_M.view(ranks, rows).T.reshape(-1), indptr=indptr)
    return RankPlan(row_token_M=sent_M % max(rows, 1), token_csr=token_csr, slot_csr=None)
