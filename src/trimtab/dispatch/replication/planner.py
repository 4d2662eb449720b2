"""Decides which rank computes which slots of a call where hot experts are replicated: the ranks gather how many slots
each has for each expert, and from that all make the same plan. Nothing is read by the host.

Legend: T local tokens, K experts per token, E experts, P ranks of the expert group, H ranks that share F, m experts at
home on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.dispatch import facts
from trimtab.dispatch.exchange import Exchange, error_scope
from trimtab.dispatch.facts import CallId
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replication.plan import ReplicaPlan, physical_ids, replica_plan, slot_shares
from trimtab.dispatch.replication.route import ReplicaRoute, experts_to_send
from trimtab.dispatch.transport import Handshake, SplitSizes, Transport
from trimtab.routing.recompute import replayed, replaying
from trimtab.routing.scores import count_ids

_NOT_NEGATIVE = (1 << 62) - 1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ranks and places to which the slots of one rank's call go.

    ids_TK: r * 2 m + place, for place m and on the replicas on rank r; -1 where the slot is dropped.
    columns: for the handshake: replicas, slots of replicas, the plan's checksum.
    """

    ids_TK: Tensor
    plan: ReplicaPlan
    columns: dict[int, Tensor]

    def replicas(self, rows: Exchange, met: Handshake, *, compared: bool) -> ReplicaRoute:
        """The way of the weights. rows: the way of the call's rows. met: the handshake that had these columns.
        compared: the ranks have compared in it what their weights are."""
        if compared:
            rows.agreed.add(("experts", "forward"))
        splits, home = met.split_sizes(facts.REPLICAS), self.plan.place_EP.shape[0] // rows.transport.size
        of_replicas = sum(theirs[facts.REPLICA_SLOTS] for theirs in met.received)
        return ReplicaRoute(
            transport=rows.transport, guard=rows.guard, run=rows.run, call=rows.call, agreed=rows.agreed, home=home,
            num_slots=of_replicas, num_home_slots=sum(theirs[facts.SLOTS] for theirs in met.received) - of_replicas,
            expert_M=experts_to_send(self.plan, rows.transport.rank, home, sum(splits.outgoing)), splits=splits,
            plan=self.plan,
        )  # fmt: skip


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

    def place(self, ids_TK: Tensor, call: CallId) -> Placement:
        """Plan a call and place this rank's slots by it; -1 drops a slot. Collective."""
        rank, own_E = self.transport.rank, count_ids(ids_TK.long(), self.num_experts)
        counts_HPE = self.gather(own_E, call)
        mine_E = counts_HPE[0 if self.etp is None else self.etp.rank, rank]
        fits = (mine_E == own_E).all()
        mine_E.copy_(own_E)  # where it does not fit, cells still hold this rank's slots until all ranks have raised
        plan = replica_plan(counts_HPE, self.config)
        cells_EP = slot_shares(plan, counts_HPE, 0 if self.etp is None else self.etp.rank, rank)
        columns = {
            facts.REPLICAS: plan.replicas_PP[rank],
            facts.REPLICA_SLOTS: (cells_EP * (plan.place_EP >= self.home)).sum(0),
            facts.PLAN: torch.where(fits, plan.checksum & _NOT_NEGATIVE, facts.UNFIT),
        }
        return Placement(ids_TK=physical_ids(ids_TK, cells_EP, plan), plan=plan, columns=columns)

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
