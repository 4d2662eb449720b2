"""Replicated experts beside what else there is: ranks that share F plan together, a compiled layer has eager mode's
bits, and on a device nothing is read between counts and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.test_replicated_exchange import EVEN, D, E, K
from dispatch.test_replicated_schedule import Layer
from dispatch.test_schedule import OneSync
from helpers.cases import PATTERNS, case
from helpers.ranks import run_ranks
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.options import CombineMode, ReplicationConfig
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.errors import TrimtabError
from trimtab.parallel.expert_tensor import ExpertTensorGroup


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


def broken_on_rank(transport: Any, what: str) -> tuple[str, tuple[int, ...], str]:
    """A good call, then one with a mistake on the last rank, which is in one ep group and in one etp group of two."""
    over_ep, over_etp = groups(transport)
    guilty, shares = dist.get_rank() == 3, ExpertTensorGroup(over_etp, "moe")
    x, ids, w, _ = case("random", dist.get_rank(), 4, E, K, D, torch.float32)

    def call(replication: ReplicationConfig | None, x: Tensor, ids: Tensor) -> None:
        own = Dispatcher(E, over_ep, replication=replication, etp=over_etp, layer="moe").dispatch(x, ids, w)
        shares.dispatch(own.x_MD, own.ids_MK, own.weights_MK, own.num_slots)

    call(EVEN, x, ids)
    wrong: dict[str, Any] = {
        "rule": lambda: call(ReplicationConfig(copy_cost=3) if guilty else EVEN, x, ids),
        "shape": lambda: call(EVEN, x[0] if guilty else x, ids),
        "ids, plain": lambda: call(None, x, ids + E if guilty else ids),
    }
    try:
        wrong[what]()
    except TrimtabError as error:
        return type(error).__name__, error.ranks, str(error)
    return "nothing", (), ""


@pytest.mark.parametrize(
    ("transport", "what", "kind"),
    [(AllToAll, "rule", "DesyncError"), (SharedMemory, "shape", "InputError"), (AllToAll, "ids, plain", "InputError")],
)
def test_a_mistake_in_one_ep_group_is_told_to_those_who_share_f(transport: type, what: str, kind: str) -> None:
    """They would wait for it until the deadline, longer than this test's."""
    for rank, (name, ranks, message) in enumerate(run_ranks(broken_on_rank, 4, transport, what, deadline=40.0)):
        assert name == kind, (rank, message)
        assert "layer moe" in message
        assert rank > 1 or ranks == (1,), (rank, message)  # of the ep group


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


@pytest.mark.parametrize("combine", ["sum", "ordered"])
def test_nothing_is_read_back_from_a_device_but_the_headers(combine: CombineMode) -> None:
    """Tensors on `meta` have no values: any read by the host would raise. In a first call settings are compared too."""
    group = OneSync()
    dispatcher = Dispatcher(E, group, combine=combine, replication=EVEN)
    dispatcher.calls = 1
    x = torch.randn(7, D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    rows = dispatcher.dispatch(x, torch.zeros(7, 2, dtype=torch.int64, device="meta"), torch.rand(7, 2, device="meta"))
    assert rows.replicas is not None
    (replicas,) = rows.replicas.send([torch.empty(E // 2, 3, D, device="meta", dtype=torch.bfloat16)])
    rows.replicas.add_home([replicas], [torch.empty(E // 2, 3, D, device="meta", dtype=torch.bfloat16)])
    y = dispatcher.combine(rows.x_MD * 2, rows)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == (x.shape, x.shape)  # type: ignore[union-attr]
    assert group.syncs == 1
