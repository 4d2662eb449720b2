"""Bugs of replicated experts: of the plan, of the movement of weights, and of replicas' gradients on their way home."""

from __future__ import annotations

from dispatch.test_replicated_exchange import weights_on_rank
from mutants.patching import Edit, RanksTest, bug

HOME, SEND = (f"dispatch.replica_route:ReplicaRoute.{name}" for name in ("add_home", "send"))
ROWS, ONE = "[_rows(t) for t in replicas]", "2r-ep2-replicas/one_expert/*"

# fmt: off
MUTANTS = (
    bug("copy_gradient_lost", "what a replica's rows say of its weights does not come home",
        Edit(HOME, ROWS, "[_rows(0 * t) for t in replicas]"), look=ONE),
    bug("copy_gradient_twice", "a replica's gradient is reduced with its rank's own and sent home besides",
        Edit(HOME, ROWS, "[_rows(2 * t) for t in replicas]"), look=ONE),
    bug("home_gradient_last",
        "gradients of replicas are summed before home's own is added: other bits than in the order of ranks",
        Edit(HOME, "for part, home in zip(received, into, strict=True):", """\
sums = [torch.zeros_like(home) for home in into]
    for part, home in zip(received, sums, strict=True):"""),
        Edit(HOME, "_add_rows(home, experts, grads.view(-1, *home.shape[1:]))", """\
_add_rows(home, experts, grads.view(-1, *home.shape[1:]))
    for home, of_replicas in zip(into, sums, strict=True):
        home.add_(of_replicas)"""), test=RanksTest(run=weights_on_rank, ranks=4, args=("alltoall",))),
    bug("plan_from_local_counts", "each rank plans from what it has itself: ranks send by one plan and wait by another",
        Edit("dispatch.replica_route:ReplicaPlanner.gather", "return replayed(", """\
counts_HPE = counts_HPE * (torch.arange(self.transport.size) == self.transport.rank)[:, None]
    return replayed("""), look=ONE),
    bug("copy_cost_of_each_rank", "a constant that each rank has measured for itself; it must raise on all, not hang",
        Edit("dispatch.dispatcher:Dispatcher.__init__", "self.replication = replication", """\
from dataclasses import replace

        replication = replace(replication, copy_cost=replication.copy_cost + transport.rank)
        self.replication = replication"""), look=ONE),
    bug("quota_one_slot_short",
        "each replica gets a slot less than its quota: right numbers, and a rank with more than the mean",
        Edit("dispatch.replica_plan:pieces_of", "slots_n=torch.cat((chosen(slots_WBPe), chosen(slots_WBP)))",
             "slots_n=(torch.cat((chosen(slots_WBPe), chosen(slots_WBP))) - 1).clamp(min=0)"), look=ONE),
    bug("slot_to_next_rank", "one slot of each expert goes to a rank beside the one that the plan says",
        Edit("dispatch.replica_plan:slot_shares", "return cells_EP", """\
starts, one_E = cells_EP.argmax(1), cells_EP.amax(1).clamp(max=1)
    rows = torch.arange(cells_EP.shape[0])
    cells_EP[rows, starts] -= one_E
    cells_EP[rows, starts - 1] += one_E
    return cells_EP"""), look=ONE),
    bug("copy_of_wrong_expert", "weights leave in another order than that of the plan",
        Edit("dispatch.replica_route:experts_to_send", "return compact(", "return home - 1 - compact("), look=ONE),
    bug("weights_not_sent_again", "a recompute takes its replicas from memory that was freed in between",
        Edit(SEND, "rows = [_rows(t) for t in tensors]", """\
from trimtab.routing.recompute import replaying

    if replaying():
        return [t.new_zeros(self.number, *t.shape[1:]) for t in tensors]
    rows = [_rows(t) for t in tensors]"""), look="4r-ep2-fsdp-replicas-recomputed/one_expert/*"),
    bug("main_grad_of_copies_lost",
        "gradients of replicas go into a buffer that nobody reads, where home's own go into main_grad",
        Edit("experts.replicated:_main_grad", "return found", "return torch.zeros_like(found)"),
        look="2r-ep2-sharedmemory-replicas-rerouted-maingrad/one_expert/*"),
)
