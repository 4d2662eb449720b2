"""What replicated experts cost in collectives: a gather and a movement of weights more in the forward, a movement in
the backward, on every rank, whatever the routing; no gather where a block is run again. Their numbers are plain ones'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dispatch.test_schedule import ALL_GATHER, recorded
from helpers.cases import PATTERNS, case
from helpers.comparing import relative_error
from helpers.ranks import run_ranks
from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import Facts
from trimtab.dispatch.host_memory import HostMemory
from trimtab.dispatch.options import CombineMode, ReplicationConfig
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.experts.module import ExpertMLP
from trimtab.routing.recompute import replay_in_recompute

E, K, D, F = 8, 3, 16, 8
EVEN = ReplicationConfig(tolerance=0.0, copy_cost=0)


@contextmanager
def met() -> Iterator[list[str]]:
    """The collectives that this process issues, and its meetings in shared memory."""
    with recorded() as calls, pytest.MonkeyPatch.context() as patch:
        turn = HostMemory.turn
        patch.setattr(HostMemory, "turn", lambda self: (calls.append("meet"), turn(self)))
        yield calls


class Layer(nn.Module):
    """Dispatch, real experts, combine; all ranks' experts are drawn alike."""

    def __init__(self, transport: Any, combine: Any, replication: ReplicationConfig | None) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(E, transport, combine=combine, replication=replication, layer="moe")
        m, first = self.dispatcher.experts_per_rank, dist.get_rank() * self.dispatcher.experts_per_rank
        self.experts = ExpertMLP(m, D, F, bias=True, dtype=torch.float64)
        for param, whole in zip(self.experts.parameters(), drawn(), strict=True):
            param.data.copy_(whole[first : first + m])

    def forward(self, x: Tensor, ids: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
        facts = Facts(self.dispatcher.weights_fact(self.experts))
        rows = self.dispatcher._dispatch(x, ids, w, mask, facts=facts)
        own = {"num_slots": rows.num_slots, "replicas": rows.replicas}
        return self.dispatcher.combine(self.experts(rows.x_MD, rows.ids_MK, rows.weights_MK, **own), rows)


def drawn() -> list[Tensor]:
    """Every expert's parameters, in the order of a module's."""
    torch.manual_seed(5)
    whole = ExpertMLP(E, D, F, bias=True, dtype=torch.float64)
    return [p.detach().normal_() / 4 for p in whole.parameters()]


def run(layer: Layer, inputs: Sequence[Any], again: bool) -> tuple[list[Tensor], list[str], list[str]]:
    """Output and all gradients of one call, and what was called in its forward and in its backward. again: whether
    the forward runs once more in the backward."""
    x, ids, w, mask = inputs
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    with met() as forward:
        if again:
            y = checkpoint(layer, x, ids, w, mask, use_reentrant=False, context_fn=replay_in_recompute)
        else:
            y = layer(x, ids, w, mask)
    with met() as backward:
        y.square().sum().backward()
    grads = [t.grad for t in (x, w, *layer.parameters())]
    layer.zero_grad()
    return [y.detach(), *grads], forward, backward


KINDS: tuple[tuple[CombineMode, bool], ...] = (("sum", True), ("sum", False), ("ordered", False))


def schedule_on_rank(transport: type) -> list[tuple[dict[str, Any], float]]:
    rank, ranks, every = dist.get_rank(), dist.get_world_size(), []
    for combine, guard in KINDS:
        made = transport(dist.group.WORLD, guard=guard)
        layer, plain = Layer(made, combine, EVEN), Layer(made, combine, None)
        found, errors = {}, []
        for pattern in PATTERNS:
            inputs = case(pattern, rank, ranks, E, K, D, torch.float64)
            ours, forward, backward = run(layer, inputs, again=False)
            bits, _, twice = run(layer, inputs, again=True)
            assert all(map(torch.equal, ours, bits)), "a block that was run again has other bits"
            truth, *_ = run(plain, inputs, again=False)
            errors += [relative_error(a, b) for a, b in zip(ours, truth, strict=True)]
            found[pattern] = (forward, backward, twice)
        every.append((found, max(errors)))
    return every


@pytest.mark.parametrize(
    ("transport", "name", "spread"),
    [(AllToAll, "all_to_all_single", 1), (AllGather, ALL_GATHER, 2), (SharedMemory, "meet", 1)],
)
def test_every_rank_issues_the_same_collectives_whatever_is_copied(transport: type, name: str, spread: int) -> None:
    """As in `test_schedule`: a movement is announced under a guard, and all-gather sends with an index. Weights go out
    unannounced, as counts tell of them; that their gradients go home is announced together with what follows. Run again
    are the count, the rows and the weights."""
    for every in run_ranks(schedule_on_rank, 4, transport):
        for (_, guard), (found, error) in zip(KINDS, every, strict=True):
            assert error <= 1e-12
            first = found[PATTERNS[0]][0]
            # When ranks of shared memory get to know each other, and the gather that is announced though unguarded.
            for _ in range((transport is SharedMemory) + (not guard)):
                assert first.pop(0) == name
            gather, weights, home = 1 + guard, spread, 1
            forward, backward = 2 + spread + guard, 1 + spread + 2 * guard
            again = 1 + spread + weights
            counts = (forward + gather + weights, backward + home, backward + home + again)
            assert found == dict.fromkeys(PATTERNS, tuple([name] * n for n in counts))
