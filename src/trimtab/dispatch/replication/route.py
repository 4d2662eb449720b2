"""The way of replicas, for one layer call: hot experts' weights to the ranks that help with them, and the replicas'
gradients home. It is a route like that of the tokens, whose tokens are a rank's experts.

Legend: P ranks, E experts, m experts at home on each rank, n replicas on this rank, M replicas that leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trimtab.autograd import not_in_graphs
from trimtab.dispatch.exchange import Exchange
from trimtab.dispatch.replication.plan import ReplicaPlan
from trimtab.dispatch.transport import SplitSizes
from trimtab.kernels.rows import compact
from trimtab.kernels.tensor_checks import row_major


@dataclass(frozen=True, kw_only=True)
class ReplicaRoute(Exchange):
    """Each method is a collective of the group, which every rank calls, with replicas or without. On every rank the
    tensors have the same widths and dtypes, in the same order.

    home: m. num_slots, num_home_slots: rows of this rank computed by replicas, and by its own experts.
    expert_M: [M] which of this rank's experts leave, by destination and then by expert. splits: how many.
    """

    home: int
    num_slots: int
    num_home_slots: int
    expert_M: Tensor
    splits: SplitSizes
    plan: ReplicaPlan

    @property
    def number(self) -> int:
        """n."""
        return sum(self.splits.incoming)

    @not_in_graphs
    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send this rank's experts, [m, *] of any dtype each, to their replicas: [n, *] of the replicas here, in the
        order of experts, contiguous."""
        rows = [_rows(t) for t in tensors]
        self.plan.replica_bytes = sum(row.shape[1] * row.element_size() for row in rows)
        tokens = (self.home,) * self.transport.size
        send = partial(self.transport.dispatch, [row.view(torch.uint8) for row in rows], self.expert_M)
        received = self.move("experts", "forward", self.splits, rows, partial(send, self.splits, tokens))
        return [
            part.contiguous().view(like.dtype).view(part.shape[0], *like.shape[1:])
            for part, like in zip(received, tensors, strict=True)
        ]

    @not_in_graphs
    def add_home(self, replicas: Sequence[Tensor], into: Sequence[Tensor], then: Sequence[Tensor] = ()) -> None:
        """Add gradients [n, *] of replicas in place into [m, *] of the experts at home, in the order of ranks. Both in
        the same dtype. then: outlines [0, *] of the rows whose gradients leave next: compared here, with these."""
        rows, splits, tokens = [_rows(t) for t in replicas], self.splits.reversed(), (self.home,) * self.transport.size
        send = partial(self.transport.combine, rows, splits, tokens)
        received = self.move("experts", "backward", splits, [*rows, *then], send)
        if then and self.agrees_on(rows[0].device):
            self.agreed.add(("dispatch", "backward"))
        for part, home in zip(received, into, strict=True):
            sizes = list(splits.incoming)
            for experts, grads in zip(self.expert_M.split(sizes), part.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                _add_rows(home, experts, grads.view(-1, *home.shape[1:]))


def _add_rows(home: Tensor, experts_n: Tensor, grads: Tensor) -> None:
    """home[experts_n] += grads, of experts that differ: no order is left to chance."""
    if home.device.type != "cpu":
        home.index_add_(0, experts_n, grads)
        return
    for expert, grad in zip(experts_n.tolist(), grads, strict=True):  # on the CPU three times as fast in bfloat16
        home[expert].add_(grad)


def experts_to_send(plan: ReplicaPlan, rank: int, home: int, replicas: int) -> Tensor:
    """[replicas] int64: a rank's `home` experts that are replicated, by destination and then by expert."""
    place_Pm = plan.place_EP[rank * home : (rank + 1) * home].T
    expert_Pm = torch.arange(home, device=place_Pm.device).expand(place_Pm.shape)
    return compact(expert_Pm.reshape(-1), (place_Pm >= home).reshape(-1), replicas)


def _rows(t: Tensor) -> Tensor:
    """[m, *] as [m, all the rest]."""
    return row_major(t.detach().reshape(t.shape[0], t.shape[1:].numel()))
