"""Replicated experts as the dispatcher moves them: slots to replicas, weights out, gradients home by one plan, which
ranks that share F make together; and compiled."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.cases import PATTERNS, case
from helpers.exchanges import EVEN, D, E, K, Layer
from helpers.ranks import run_ranks
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.options import COMBINE_MODES, CombineMode, ReplicationConfig
from trimtab.dispatch.replica_route import ReplicaRoute
from trimtab.dispatch.route import Dispatched
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.parallel.expert_tensor import ExpertTensorGroup

CONFIGS = (EVEN, ReplicationConfig(tolerance=0.25, copy_cost=0), ReplicationConfig(copy_cost=2))


def held(rows: Dispatched, home: int) -> Tensor:
    """The global numbers of the experts on this rank, its own and then the replicas; by sending them."""
    assert isinstance(rows.replicas, ReplicaRoute)
    first = dist.get_rank() * home
    (replicas,) = rows.replicas.send([torch.arange(first, first + home)[:, None]])
    return torch.cat((torch.arange(first, first + home), replicas[:, 0]))


def numbers_on_rank(transport: str) -> None:
    """The host's numbers and the report's are those of the ids that came."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made, m = TRANSPORTS[transport](dist.group.WORLD), E // ranks
    for number, (combine, config) in enumerate(itertools.product(COMBINE_MODES, CONFIGS)):
        dispatcher = Dispatcher(E, made, combine=combine, replication=config, layer=f"moe.{number}")
        for pattern in PATTERNS:
            rows = dispatcher.dispatch(*case(pattern, rank, ranks, E, K, D, torch.float64, number))
            replicas, report = rows.replicas, dispatcher.replicated
            assert replicas is not None
            assert report is not None
            experts, mine = held(rows, m), rows.ids_MK[rows.ids_MK >= 0]
            assert experts[m:].tolist() == sorted(set(experts[m:].tolist()) - set(experts[:m].tolist()))
            assert rows.num_slots == len(mine) == int(report.loads_after_P[rank])
            assert replicas.num_slots == int((mine >= m).sum())
            assert replicas.num_home_slots == int((mine < m).sum())
            assert replicas.number == len(experts) - m == int(report.replicas_P[rank])
            total = int(report.loads_before_P.sum())
            assert int(report.loads_after_P.sum()) == total
            if config is EVEN:
                assert int(report.loads_after_P.max()) <= -(-total // ranks)


@pytest.mark.parametrize(("transport", "ranks"), [("allgather", 4), ("auto", 2)])
def test_numbers_of_slots_are_known_on_the_host(transport: str, ranks: int) -> None:
    run_ranks(numbers_on_rank, ranks, transport)


KINDS = (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn, torch.int8)


def weights_of(e: int, long: bool) -> list[Tensor]:
    """What one expert has: [1, *], of many dtypes and odd widths; and rows so long that each is sent by itself."""
    g = torch.Generator().manual_seed(e)
    shapes = [(3, 5), (1,), (7,), (2, 2, 2), (9,), ()] if not long else [(3, 101, 1001), (300_001,)] + [(5,)] * 4
    return [(torch.randn(1, *shape, generator=g) * 40).to(kind) for shape, kind in zip(shapes, KINDS, strict=True)]


def gradients_of(replicas: list[int], rank: int) -> list[Tensor]:
    """What replicas on a rank have: [n, *], so that the order in which they are added shows."""
    g = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(len(replicas), *s, generator=g) * 1e3).to(kind)
        for s, kind in (((3, 7), KINDS[0]), ((33,), KINDS[1]))
    ]


def weights_on_rank(transport: str) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher, m, moved = Dispatcher(E, TRANSPORTS[transport](dist.group.WORLD), replication=EVEN), E // ranks, 0
    for seed, pattern in enumerate(("one_expert", "one_rank", "empty_source", "empty_world")):
        x, ids, w, _ = case(pattern, rank, ranks, E, K, D, torch.float32, seed)
        rows = dispatcher.dispatch(x, ids, w)
        assert rows.replicas is not None
        here = held(rows, m)[m:].tolist()
        for long in (False, True):
            own = [torch.cat(parts) for parts in zip(*(weights_of(rank * m + e, long) for e in range(m)), strict=True)]
            for copy, like in zip(rows.replicas.send(own), own, strict=True):
                assert copy.is_contiguous()
                assert copy.dtype == like.dtype
                assert copy.shape == (len(here), *like.shape[1:])
                copy.fill_(0)  # it is the caller's
            for number, tensor in enumerate(rows.replicas.send(own)):
                wanted = [weights_of(e, long)[number] for e in here]
                assert all(
                    torch.equal(tensor[i : i + 1].view(torch.uint8), e.view(torch.uint8)) for i, e in enumerate(wanted)
                )
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, here)
        moved += sum(map(len, everyone))
        into = [torch.full((m, *t.shape[1:]), 1.0, dtype=t.dtype) for t in gradients_of([], rank)]
        truth = [t.clone() for t in into]
        rows.replicas.add_home(gradients_of(here, rank), into)
        for source, there in enumerate(everyone):
            for total, part in zip(truth, gradients_of(there, source), strict=True):
                for i, e in enumerate(there):
                    if e // m == rank:
                        total[e % m] += part[i]
        assert all(map(torch.equal, into, truth))
    return moved


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_copies_are_the_weights_byte_by_byte_and_gradients_come_home_in_the_order_of_ranks(transport: str) -> None:
    moved = run_ranks(weights_on_rank, 4, transport)
    assert moved[0] > 6


def groups(transport: Any) -> tuple[Any, Any]:
    """Of four ranks in two rows, ep over columns and etp over rows: the transports of this one."""
    ep, etp = ([dist.new_group(ranks) for ranks in lines] for lines in (([0, 2], [1, 3]), ([0, 1], [2, 3])))
    return transport(ep[dist.get_rank() % 2]), transport(etp[dist.get_rank() // 2])


def shares_on_rank(transport: Any, combine: CombineMode) -> None:
    over_ep, over_etp = groups(transport)
    dispatcher = Dispatcher(E, over_ep, combine=combine, replication=EVEN, etp=over_etp, layer="moe")
    shares = ExpertTensorGroup(over_etp, "moe")
    for pattern in PATTERNS:
        own = dispatcher.dispatch(*case(pattern, dist.get_rank(), 4, E, K, D, torch.float64))
        rows, report = shares.dispatch(own.x_MD, own.ids_MK, own.weights_MK, own.num_slots), dispatcher.replicated
        assert report is not None
        assert int((rows.ids_MK >= 0).sum()) == int(report.loads_after_P[dist.get_rank() // 2])
        assert int(report.loads_after_P.max()) <= -(-int(report.loads_before_P.sum()) // 2)


@pytest.mark.parametrize(("transport", "combine"), [(AllToAll, "sum"), (SharedMemory, "ordered")])
def test_ranks_that_share_f_plan_what_all_of_them_compute(transport: type, combine: CombineMode) -> None:
    run_ranks(shares_on_rank, 4, transport, combine)


def compiled_on_rank() -> list[bool]:
    layer = Layer(AllToAll(dist.group.WORLD), "sum", EVEN)
    run = torch.compile(layer, backend="aot_eager", dynamic=True)
    same = []
    for pattern in ("one_rank", "empty_source", "empty_world", "random"):
        x, ids, w, mask = case(pattern, dist.get_rank(), 2, E, K, D, torch.float64)
        every = []
        for fn in (layer, run):
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            y = fn(leaves[0], ids, leaves[1], mask)
            every.append([y, *torch.autograd.grad(y.square().sum(), [*leaves, *layer.parameters()])])
        same += map(torch.equal, *every)
    return same


def test_a_compiled_layer_has_the_bits_of_eager_mode() -> None:
    for same in run_ranks(compiled_on_rank, 2, deadline=120.0):
        assert len(same) == 4 * 7
        assert all(same)
