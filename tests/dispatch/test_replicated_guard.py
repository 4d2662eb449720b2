"""Replicated experts where ranks do not agree: each mistake of one rank is named on every rank, before weights move,
and the group lives on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dispatch.test_replicated_schedule import D as LAYER_D
from dispatch.test_replicated_schedule import Layer
from dispatch.test_schedule import recorded
from helpers.cases import case
from helpers.ranks import run_ranks
from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import Facts
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Handshake, SplitSizes, Transport
from trimtab.errors import DesyncError, InputError
from trimtab.routing.recompute import replay_in_recompute

E, K, D, RANKS = 6, 2, 8, 3
RULE = ReplicationConfig(copy_cost=2)
TRANSPORTS = [AllToAll, AllGather, SharedMemory]


class Changed:
    """A transport that on the guilty rank changes what it gathers: counts that peers sent, or that it sends itself."""

    def __init__(self, inner: Any, what: str) -> None:
        self.inner, self.what, self.guard = inner, what, inner.guard
        self.rank, self.size = inner.rank, inner.size

    def handshake(self, message_PC: Tensor) -> Handshake:
        told: Handshake = self.inner.handshake(message_PC)
        return told

    def dispatch(self, tensors: Sequence[Tensor], *args: Any) -> list[Tensor]:
        moved: list[Tensor] = self.inner.dispatch(tensors, *args)
        return moved

    def combine(self, tensors: Sequence[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        counts = tensors[0].dtype == torch.int64
        if counts and self.what == "sent":
            tensors = [tensors[0] + 1]
        received: list[Tensor] = self.inner.combine(tensors, splits, tokens)
        if counts and self.what == "received":
            received[0][(self.rank + 1) % self.size, 0] += 5
        return received


def said_of(call: Callable[[], Any]) -> tuple[str, tuple[int, ...], str, list[str]]:
    """What a call raised, and the collectives until then."""
    with recorded() as calls:
        try:
            call()
        except (DesyncError, InputError) as error:
            return type(error).__name__, error.ranks, str(error), calls
    return "nothing", (), "", calls


CONFIGS: dict[str, tuple[ReplicationConfig | None, ReplicationConfig | None]] = {
    "copy_cost": (RULE, ReplicationConfig(copy_cost=3)),
    "tolerance": (RULE, ReplicationConfig(copy_cost=2, tolerance=0.25)),
    "off": (RULE, None), "on": (None, RULE),
}  # fmt: skip


def configs_on_rank(transport: Callable[..., Transport], guard: bool) -> dict[str, Any]:
    rank, made, found = dist.get_rank(), transport(dist.group.WORLD, guard=guard), {}
    x, ids, w, _ = case("one_rank", rank, RANKS, E, K, D, torch.float32)
    for what, (others, guilty) in CONFIGS.items():
        dispatcher = Dispatcher(E, made, layer="moe", replication=guilty if rank == 1 else others)
        found[what] = said_of(lambda d=dispatcher: d.dispatch(x, ids, w))
    wide = Dispatcher(2 * E if rank == 1 else E, made, layer="moe", replication=RULE)
    found["experts"] = said_of(lambda: wide.dispatch(x, ids, w))
    dispatcher = Dispatcher(E, made, layer="moe", replication=RULE)
    found["good"] = said_of(lambda: dispatcher._dispatch(x, ids, w, facts=Facts("up, down")))
    own = Facts("up" if rank == 1 else "up, down")
    found["other weights"] = said_of(lambda: dispatcher._dispatch(x, ids, w, facts=own))
    found["good again"] = said_of(lambda: dispatcher.dispatch(x, ids, w))
    for what in ("sent", "received"):
        changed = Dispatcher(E, Changed(made, what) if rank == 1 else made, layer="moe", replication=RULE)
        found[what] = said_of(lambda d=changed: d.dispatch(x, ids, w))
    widths = dispatcher.dispatch(x, ids, w).replicas
    assert widths is not None
    if guard:
        found["weights"] = said_of(lambda: widths.send([torch.zeros(E // RANKS, 5 if rank == 1 else 4)]))
        found["gradients"] = said_of(
            lambda: widths.add_home([torch.zeros(widths.number, 5 - rank % 2)], [torch.zeros(2, 5 - rank % 2)])
        )
        found["dtypes"] = said_of(
            lambda: widths.send([torch.zeros(2, 4), torch.zeros(2, 4).to([torch.int8, torch.uint8][rank % 2])])
        )
    found["good at last"] = said_of(lambda: dispatcher.dispatch(x, ids, w))
    return found


SAYS = {
    "copy_cost": r"rank 1: (route|count) forward of layer moe, call 0 .*with another dtype.* or fingerprint",
    "tolerance": r"with another dtype.* or fingerprint.*ReplicationConfig\(tolerance=",
    "off": r"rank 0: route forward of layer moe.*rank 1: count forward of layer moe",
    "on": r"rank 0: count forward of layer moe.*rank 1: route forward of layer moe",
    "experts": r"rank 1: route forward of layer moe, call 0 \(12 experts",
    "other weights": r"hold other experts than rank \d \(call \d\), which has \(up",
    "sent": r"rank\(s\) 1 have other numbers of slots for each expert than those that were gathered from them",
    "received": r"place replicas of experts by another plan",
    "weights": r"phase experts\] rows of 4 float32, 5 float32, 4 float32 come from ranks 0..2 \(forward.*weights",
    "gradients": r"phase experts\] rows of 5 float32, 4 float32, 5 float32 come from ranks 0..2 \(backward.*weights",
    "dtypes": r"phase experts\] rows of 8 values of kind (\w+), 8 values of kind (\w+), 8 values of kind \1 come",
}


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_would_plan_or_send_otherwise_are_named_on_every_rank(transport: type, guard: bool) -> None:
    everyone = run_ranks(configs_on_rank, RANKS, transport, guard, deadline=60.0)
    for rank, found in enumerate(everyone):
        assert set(found) - {"good", "good again", "good at last"} == set(SAYS) - (
            set() if guard else {"weights", "gradients", "dtypes"}
        )
        for what, (kind, ranks, message, calls) in found.items():
            assert kind == ("nothing" if what.startswith("good") else "DesyncError"), (rank, what, message)
            assert re.search(SAYS.get(what, ""), message, re.DOTALL), (rank, what, message)
            assert what.startswith("good") or ranks == ((0, 2) if rank == 1 and what not in ("sent",) else (1,)), (
                rank,
                what,
                message,
            )
            assert calls == everyone[0][what][3], "ranks have issued different collectives"


def unusable_on_rank(guard: bool) -> list[tuple[str, tuple[int, ...], str, list[str]]]:
    guilty = dist.get_rank() == 1
    dispatcher = Dispatcher(E, AllToAll(dist.group.WORLD, guard=guard), replication=RULE)
    x, ids, w, mask = case("masked", dist.get_rank(), RANKS, E, K, D, torch.float32)
    wrong: list[Callable[[], tuple[Tensor, ...]]] = [
        lambda: (x[None], ids, w, mask), lambda: (x, ids[1:], w, mask), lambda: (x, ids, w, mask),
        lambda: (x.to_sparse(), ids, w, mask), lambda: (x.to("meta"), ids, w, mask),
        lambda: (x, ids + E, w, mask), lambda: (x, ids, w * float("nan"), mask), lambda: (x, ids, w, mask),
    ]  # fmt: skip
    return [
        said_of(lambda make=make: dispatcher.dispatch(*(make() if guilty else (x, ids, w, mask)))) for make in wrong
    ]


@pytest.mark.parametrize("guard", [True, False])
def test_what_one_rank_cannot_send_raises_on_every_rank(guard: bool) -> None:
    everyone = run_ranks(unusable_on_rank, RANKS, guard, deadline=30.0)
    for rank, said in enumerate(everyone):
        for number, (kind, ranks, message, calls) in enumerate(said):
            assert kind == ("nothing" if number in (2, 7) else "InputError"), (rank, number, message)
            assert number in (2, 7) or ranks == (1,), (rank, number, message)
            assert calls == everyone[0][number][3], "ranks have issued different collectives"


def asked_on_rank() -> list[tuple[str, tuple[int, ...], str, list[str]]]:
    """A backward that is asked for less on one rank: for no gradient of the rows, then for none of the weights."""
    layer = Layer(AllToAll(dist.group.WORLD), "sum", RULE)
    x, ids, w, _ = case("one_rank", dist.get_rank(), 2, layer.dispatcher.num_experts, K, LAYER_D, torch.float64)
    x, params, found = x.requires_grad_(), list(layer.parameters()), []
    for less in (params, [x], [x, *params]):
        y = layer(x, ids, w, None).sum()
        asked = less if dist.get_rank() == 1 else [x, *params]
        found.append(said_of(lambda y=y, asked=asked: torch.autograd.grad(y, asked)))
    return found


def test_a_backward_that_is_asked_for_less_on_one_rank_is_named_on_every_rank() -> None:
    everyone = run_ranks(asked_on_rank, 2, deadline=30.0)
    for rank, (no_rows, no_weights, all_of_it) in enumerate(everyone):
        for kind, ranks, message, calls in (no_rows, no_weights):
            assert (kind, ranks) == ("DesyncError", (1 - rank,)), message
            assert calls == ["all_to_all_single"] * 3, "the rows of the combine, and no others, have moved"
        assert "or what a backward is asked for, differs between ranks" in no_rows[2]
        assert "rank 1: dispatch backward" in no_weights[2]
        assert all_of_it[0] == "nothing"


def undecided_on_rank() -> list[tuple[str, tuple[int, ...], str, list[str]]]:
    """A block whose router, not one of ours, takes another expert when it runs again, on one rank."""
    dispatcher, runs = Dispatcher(E, AllToAll(dist.group.WORLD), layer="moe", replication=RULE), [0]
    x, ids, w, _ = case("one_rank", dist.get_rank(), RANKS, E, K, D, torch.float32)

    def block(x: Tensor) -> Tensor:
        runs[0] += 1
        other = runs[0] == 2 and dist.get_rank() == 1
        rows = dispatcher.dispatch(x, (ids + 1) % E if other else ids, w)
        return dispatcher.combine(rows.x_MD.exp(), rows)

    y = checkpoint(block, x.requires_grad_(), use_reentrant=False, context_fn=replay_in_recompute)
    return [said_of(lambda: y.sum().backward())]


def test_a_block_that_decides_otherwise_when_run_again_is_named_on_every_rank() -> None:
    for ((kind, ranks, message, _),) in run_ranks(undecided_on_rank, RANKS):
        assert (kind, ranks) == ("DesyncError", (1,))
        assert re.search(r"rank\(s\) 1 have other numbers of slots.*`trimtab.replay_in_recompute`", message)
