"""Replicas of hot experts in one layer call: which rank computes which slots, and the way of the weights there and of
their gradients home. That is a route like that of the tokens, whose tokens are a rank's experts. Ranks gather how many
slots each has for each expert, and from that all make the same plan; the host reads nothing.

Legend: T local tokens, K experts per token, E experts, P ranks of the expert group, H ranks that share F, m experts at
home on each rank, n replicas on this rank, M replicas that leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trimtab.autograd import not_in_graphs
from trimtab.dispatch import facts
from trimtab.dispatch.exchange import Exchange, error_scope
from trimtab.dispatch.facts import CallId
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replica_plan import ReplicaPlan, physical_ids, replica_plan, slot_shares
from trimtab.dispatch.transport import Handshake, SplitSizes, Transport
from trimtab.kernels.one_launch import OneLaunch
from trimtab.kernels.rows import compact
from trimtab.kernels.tensor_checks import row_major, static_by_default
from trimtab.routing.recompute import replayed, replaying
from trimtab.routing.scores import count_ids

_NOT_NEGATIVE = (1 << 62) - 1


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
    if static_by_default(home):
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


_launches: WeakValueDictionary[tuple[object, ...], OneLaunch] = WeakValueDictionary()
"""One for all layers whose counts have one shape on one device, while one of them lives."""


def _plan(config: ReplicationConfig, etp_rank: int, rank: int, counts_HPE: Tensor, own_E: Tensor) -> list[Tensor]:
    """A `ReplicaPlan`'s tensors, this rank's `slot_shares`, the PLAN of its handshake, and its slots of replicas [P].
    Writes own_E, this rank's counts [E], into counts_HPE."""
    mine_E = counts_HPE[etp_rank, rank]
    fits = (mine_E == own_E).all()
    mine_E.copy_(own_E)  # where it does not fit, cells still hold this rank's slots until all ranks have raised
    p = replica_plan(counts_HPE, config)
    cells_EP = slot_shares(p, counts_HPE, etp_rank, rank)
    fact = torch.where(fits, p.checksum & _NOT_NEGATIVE, facts.UNFIT)
    of_replicas_P = (cells_EP * (p.place_EP >= counts_HPE.shape[2] // counts_HPE.shape[1])).sum(0)
    return [p.slots_EP, p.place_EP, p.replicas_PP, p.cap, p.checksum, cells_EP, fact, of_replicas_P]


class ReplicaPlanner:
    """Plans the replicas of one layer.

    etp: over the ranks that share F, which compute each other's slots too; None where F is whole. run: `layer_frame` of
    the layer.
    """

    def __init__(
        self, config: ReplicationConfig, num_experts: int, transport: Transport, etp: Transport | None,
        run: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.config, self.num_experts, self.transport, self.etp, self._run = config, num_experts, transport, etp, run
        self.home = num_experts // transport.size
        self._launches: dict[torch.device, OneLaunch] = {}

    def place(self, ids_TK: Tensor, call: CallId) -> tuple[Tensor, ReplicaPlan, dict[int, Tensor]]:
        """Plan a call and place this rank's slots by it; -1 drops a slot. Collective. Returns where they go, r * 2 m +
        place for place m and on the replicas on rank r, the plan, and columns of the handshake: replicas, slots of
        replicas, the plan's checksum."""
        rank, own_E = self.transport.rank, count_ids(ids_TK.long(), self.num_experts)
        counts_HPE = self.gather(own_E, call)
        if (planned := self._launches.get(own_E.device)) is None:
            of = self.config, 0 if self.etp is None else self.etp.rank, rank
            planned = _launches.setdefault((*of, counts_HPE.shape, own_E.device), OneLaunch(partial(_plan, *of)))
            self._launches[own_E.device] = planned
        *made, cells_EP, fact, of_replicas_P = planned(counts_HPE, own_E)
        plan = ReplicaPlan(*made)
        columns = {facts.REPLICAS: plan.replicas_PP[rank], facts.REPLICA_SLOTS: of_replicas_P, facts.PLAN: fact}
        return physical_ids(ids_TK, cells_EP, plan), plan, columns

    def route(self, plan: ReplicaPlan, rows: Exchange, met: Handshake, *, compared: bool) -> ReplicaRoute:
        """The way of the weights. rows: the way of the call's rows. met: the handshake that had the plan's columns.
        compared: the ranks have compared in it what their weights are."""
        if compared:
            rows.agreed.add(("experts", "forward"))
        splits = met.split_sizes(facts.REPLICAS)
        of_replicas = sum(theirs[facts.REPLICA_SLOTS] for theirs in met.received)
        return ReplicaRoute(
            transport=rows.transport, guard=rows.guard, run=rows.run, call=rows.call, agreed=rows.agreed, plan=plan,
            num_slots=of_replicas, num_home_slots=sum(theirs[facts.SLOTS] for theirs in met.received) - of_replicas,
            expert_M=experts_to_send(plan, self.transport.rank, self.home, sum(splits.outgoing)), splits=splits,
            home=self.home,
        )  # fmt: skip

    def gather(self, own_E: Tensor, call: CallId, *, usable: bool = True) -> Tensor:
        """Every rank's slots of each expert: [H, P, E]. Collective, but not in the second run of a checkpointed block:
        what is computed again is computed where it was. usable=False: this rank cannot take part in the call."""
        height = 1 if self.etp is None else self.etp.size
        if replaying():
            counts = own_E.new_zeros(height * self.transport.size, self.num_experts)
        else:
            counts = self._from_every_rank(self.transport, own_E, call, usable)
            if self.etp is not None:
                with error_scope(getattr(self.transport, "guard", None), getattr(self.etp, "guard", None)):
                    counts = self._from_every_rank(self.etp, counts.reshape(-1), call, usable)
        counts_HPE = counts.reshape(height, self.transport.size, self.num_experts)
        return replayed([counts_HPE], "slots of each rank")[0]

    def _from_every_rank(self, transport: Transport, row_W: Tensor, call: CallId, usable: bool) -> Tensor:
        """The row of each rank, [ranks, W]: a token that is sent to all. In a first call ranks compare before it moves,
        on any device: those of other settings would wait for messages of other sizes."""
        ones = (1,) * transport.size
        splits = SplitSizes(outgoing=ones, incoming=ones, everyone=(ones,) * len(ones))
        row_PW = row_W.repeat(len(ones), 1)
        exchange = Exchange(
            transport=transport, guard=getattr(transport, "guard", None), run=self._run, call=call,
            agrees=True if call.number == 0 else None,
        )  # fmt: skip
        send = partial(transport.combine, [row_PW], splits, ones)
        return exchange.move("route", "forward", splits, [row_PW], send, usable=usable)[0]
