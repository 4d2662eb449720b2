"""Bugs of replicated experts: of the plan, of the movement of weights, and of replicas' gradients on their way home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dispatch.test_replicated_exchange import weights_on_rank
from helpers.layout_case import Layout, run_plan, solve_all
from helpers.layout_truth import Case
from mutants.patching import Mutant, Patches, RanksTest
from trimtab.dispatch import replica_plan, replica_route
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.replica_plan import Pieces
from trimtab.dispatch.replica_route import ReplicaPlanner, ReplicaRoute
from trimtab.experts import replicated
from trimtab.routing.recompute import replaying


def _times(p: Patches, factor: int) -> None:
    @p.around(ReplicaRoute, "add_home")
    def add_home(
        original: Any, self: ReplicaRoute, replicas: Sequence[Tensor], into: Sequence[Tensor], *then: Any
    ) -> None:
        original(self, [factor * grad for grad in replicas], into, *then)


def _home_last(p: Patches) -> None:
    @p.around(ReplicaRoute, "add_home")
    def add_home(
        original: Any, self: ReplicaRoute, replicas: Sequence[Tensor], into: Sequence[Tensor], *then: Any
    ) -> None:
        sums = [torch.zeros_like(home) for home in into]
        original(self, replicas, sums, *then)
        for home, of_replicas in zip(into, sums, strict=True):
            home.add_(of_replicas)


def _local_counts(p: Patches) -> None:
    @p.around(ReplicaPlanner, "gather")
    def gather(original: Any, self: ReplicaPlanner, *args: Any, **options: Any) -> Tensor:
        counts_HPE: Tensor = original(self, *args, **options)
        own = torch.zeros_like(counts_HPE)
        own[:, self.transport.rank] = counts_HPE[:, self.transport.rank]
        return own


def _own_constants(p: Patches) -> None:
    @p.around(Dispatcher, "__init__")
    def init(original: Any, self: Dispatcher, experts: int, transport: Any = None, **options: Any) -> None:
        rule = options.get("replication")
        if rule is not None and transport is not None:
            options["replication"] = replace(rule, copy_cost=rule.copy_cost + transport.rank)
        original(self, experts, transport, **options)


def _one_slot_short(p: Patches) -> None:
    @p.around(replica_plan, "pieces_of")
    def pieces_of(original: Any, *args: Any) -> Pieces:
        made: Pieces = original(*args)
        return replace(made, slots_n=(made.slots_n - 1).clamp(min=0))


def _one_slot_astray(p: Patches) -> None:
    @p.around(replica_route, "slot_shares")
    def slot_shares(original: Any, *args: Any) -> Tensor:
        cells_EP: Tensor = original(*args)
        starts, last = cells_EP.argmax(1), cells_EP.shape[1] - 1
        rows = torch.arange(cells_EP.shape[0])
        one_E = cells_EP.amax(1).clamp(max=1)
        cells_EP[rows, starts] -= one_E
        cells_EP[rows, (starts + last) % (last + 1)] += one_E
        return cells_EP


def _wrong_expert(p: Patches) -> None:
    @p.around(replica_route, "experts_to_send")
    def experts_to_send(original: Any, plan: Any, rank: int, home: int, replicas: int) -> Tensor:
        expert_M: Tensor = original(plan, rank, home, replicas)
        return home - 1 - expert_M


def _not_sent_again(p: Patches) -> None:
    @p.around(ReplicaRoute, "send")
    def send(original: Any, self: ReplicaRoute, tensors: Sequence[Tensor]) -> list[Tensor]:
        if replaying():
            return [t.new_zeros(self.number, *t.shape[1:]) for t in tensors]
        made: list[Tensor] = original(self, tensors)
        return made


def _main_grad_lost(p: Patches) -> None:
    p.wrap(replicated, "_main_grad", lambda main_grad: lambda owner: torch.zeros_like(main_grad(owner)))


def main_grads_on_rank() -> None:
    """Gradients of replicated experts that go into `main_grad`, against the truth."""
    layout = Layout(ep=2, main_grad="accumulate", replicate_experts=0.0)
    plan = [(layout, [Case(kind="hot", length=5)])]
    bad = {name: error for name, error in run_plan(plan, solve_all(2, plan))[layout].items() if error > layout.bound}
    assert not bad, bad


ORDER = RanksTest(run=weights_on_rank, ranks=4, args=("alltoall",))
MAIN_GRADS = RanksTest(run=main_grads_on_rank, ranks=2)
MUTANTS = (
    Mutant(name="copy_gradient_lost", patch=lambda p: _times(p, 0), look="2r-ep2-replicas/one_expert/*",
           says="what a replica's rows say of its weights does not come home"),
    Mutant(name="copy_gradient_twice", patch=lambda p: _times(p, 2), look="2r-ep2-replicas/one_expert/*",
           says="a replica's gradient is reduced with its rank's own and sent home besides"),
    Mutant(name="home_gradient_last", patch=_home_last, test=ORDER,
           says="gradients of replicas are summed before home's own is added: other bits than in the order of ranks"),
    Mutant(name="plan_from_local_counts", patch=_local_counts, look="2r-ep2-replicas/one_expert/*",
           says="each rank plans from what it has itself: ranks send by one plan and wait by another"),
    Mutant(name="copy_cost_of_each_rank", patch=_own_constants, look="2r-ep2-replicas/one_expert/*",
           says="a constant that each rank has measured for itself; it must raise on all, not hang"),
    Mutant(name="quota_one_slot_short", patch=_one_slot_short, look="2r-ep2-replicas/one_expert/*",
           says="each replica gets a slot less than its quota: right numbers, and a rank with more than the mean"),
    Mutant(name="slot_to_next_rank", patch=_one_slot_astray, look="2r-ep2-replicas/one_expert/*",
           says="one slot of each expert goes to a rank beside the one that the plan says"),
    Mutant(name="copy_of_wrong_expert", patch=_wrong_expert, look="2r-ep2-replicas/one_expert/*",
           says="weights leave in another order than that of the plan"),
    Mutant(name="weights_not_sent_again", patch=_not_sent_again, look="4r-ep2-fsdp-replicas-recomputed/one_expert/*",
           says="a recompute takes its replicas from memory that was freed in between"),
    Mutant(name="main_grad_of_copies_lost", patch=_main_grad_lost, test=MAIN_GRADS,
           says="gradients of replicas go into a buffer that nobody reads, where home's own go into main_grad"),
)  # fmt: skip
