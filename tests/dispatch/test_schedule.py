"""What the exchange may cost: collectives, host syncs, no branch on emptiness; and the shapes that it refuses."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import trimtab
from helpers.cases import PATTERNS, case
from helpers.comparing import relative_error
from helpers.exchanges import ALL_GATHER, EVEN, D, E, F, K, Layer, recorded
from helpers.ranks import run_ranks
from helpers.weights import expert_weights
from trimtab.dispatch.all_gather import AllGather, all_gather_tensor
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.checks import _checked_on_device, name_bytes
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import COLUMNS
from trimtab.dispatch.options import COMBINE_MODES, CombineMode, ReplicationConfig
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Handshake, SplitSizes
from trimtab.errors import ConfigError, InputError
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.plan import plan_experts
from trimtab.kernels import rows as rows_module
from trimtab.kernels.choose import get_backend
from trimtab.routing.recompute import replay_in_recompute

KINDS = list(itertools.product(COMBINE_MODES, (True, False)))
REPLICATIONS = (None, EVEN)


def run(layer: Layer, inputs: Sequence[Any], again: bool) -> tuple[list[Tensor], list[str], list[str]]:
    """Output and all gradients of one call, and what was called in its forward and in its backward. again: whether
    the forward runs once more in the backward."""
    x, ids, w, mask = inputs
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    with recorded() as forward:
        if again:
            y = checkpoint(layer, x, ids, w, mask, use_reentrant=False, context_fn=replay_in_recompute)
        else:
            y = layer(x, ids, w, mask)
    with recorded() as backward:
        y.square().sum().backward()
    grads = [t.grad for t in (x, w, *layer.parameters())]
    layer.zero_grad()
    return [y.detach(), *grads], forward, backward


Calls = tuple[list[str], list[str], list[str]]


def schedule_on_rank(transport: type) -> list[list[dict[str, Calls]]]:
    warnings.simplefilter("error", FutureWarning)  # this process ends with the test
    rank, ranks, every = dist.get_rank(), dist.get_world_size(), []
    for combine, guard in KINDS:
        made = transport(dist.group.WORLD, guard=guard)
        layers = [Layer(made, combine, replication) for replication in REPLICATIONS]
        found: list[dict[str, Calls]] = [{}, {}]
        for pattern in PATTERNS:
            inputs, plain = case(pattern, rank, ranks, E, K, D, torch.float64), list[Tensor]()
            for layer, calls in zip(layers, found, strict=True):
                ours, forward, backward = run(layer, inputs, again=False)
                bits, _, twice = run(layer, inputs, again=True)
                assert all(map(torch.equal, ours, bits)), "a block that was run again has other bits"
                plain = plain or ours
                assert max(map(relative_error, ours, plain)) <= 1e-12, "replicas change a number"
                calls[pattern] = (forward, backward, twice)
        every.append(found)
    return every


@pytest.mark.parametrize(
    ("transport", "name", "spread"),
    [(AllToAll, "all_to_all_single", 1), (AllGather, ALL_GATHER, 2), (SharedMemory, "meet", 1)],
)
def test_every_rank_issues_the_same_collectives_whatever_the_routing(transport: type, name: str, spread: int) -> None:
    """Headers, rows out, rows home; and in the backward rows out, rows home. All-gather spreads with an index. Ranks
    that share memory meet as often, and issue no collective. With a guard each movement but the first, which has its
    headers, is announced by one more. Run again are the count and the rows.

    Replicated experts cost a gather and a movement of weights more in the forward, a movement in the backward, and no
    gather where a block is run again. Weights go out unannounced, as counts tell of them; that their gradients go home
    is announced together with what follows.
    """
    for every in run_ranks(schedule_on_rank, 4, transport):
        for (_, guard), (plain, replicated) in zip(KINDS, every, strict=True):
            # When ranks of shared memory get to know each other, and the gather that is announced though unguarded.
            for found, more in ((plain, transport is SharedMemory), (replicated, not guard)):
                assert all(found[PATTERNS[0]][0].pop(0) == name for _ in range(more))
            forward, backward, again = 2 + spread + guard, 1 + spread + 2 * guard, 1 + spread
            for found, counts in (
                (plain, (forward, backward, backward + again)),
                (replicated, (forward + 1 + guard + spread, backward + 1, backward + 1 + again + spread)),
            ):
                assert found == dict.fromkeys(PATTERNS, tuple([name] * n for n in counts))


def test_the_older_name_of_the_all_gather_serves_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    assert all_gather_tensor() is dist.all_gather_into_tensor


class OneSync:
    """A group of two whose headers are known: the only thing the host may learn. Everything else is on `meta`."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.syncs = 0

    def handshake(self, message_PC: Tensor) -> Handshake:
        self.syncs += 1
        told = [[7, 8, 7, 0, *[0] * (COLUMNS - 4)], [5, 6, 7, 0, *[0] * (COLUMNS - 4)]]
        assert message_PC.shape == (2, COLUMNS)
        return Handshake(sent=told, received=told, everyone=[])

    def dispatch(
        self, tensors: list[Tensor], row_token_M: Tensor, splits: SplitSizes, tokens: tuple[int, ...]
    ) -> list[Tensor]:
        return self.combine([t.index_select(0, row_token_M) for t in tensors], splits, tokens)

    def combine(self, tensors: list[Tensor], splits: SplitSizes, tokens: tuple[int, ...]) -> list[Tensor]:
        assert {t.shape[0] for t in tensors} == {sum(splits.outgoing)}
        return [t.new_empty(sum(splits.incoming), t.shape[1]) for t in tensors]


@pytest.mark.parametrize("combine", COMBINE_MODES)
@pytest.mark.parametrize("replication", REPLICATIONS)
@pytest.mark.parametrize("transport", [None, OneSync])
def test_nothing_is_read_back_from_a_device_but_the_headers(
    transport: Any, replication: ReplicationConfig | None, combine: CombineMode
) -> None:
    """Tensors on `meta` have no values: any read by the host would raise. In a first call settings are compared too."""
    group = transport() if transport else None
    dispatcher = Dispatcher(E, group, combine=combine, replication=replication)
    dispatcher.calls = 1
    with torch.device("meta"):
        experts = ExpertMLP(dispatcher.experts_per_rank, D, F, dtype=torch.bfloat16)
        x = torch.randn(7, D, dtype=torch.bfloat16, requires_grad=True)
        ids, w = torch.zeros(7, 2, dtype=torch.int64), torch.rand(7, 2, requires_grad=True)
        rows = dispatcher.dispatch(x, ids, w)
        own = {"num_slots": rows.num_slots, "replicas": rows.replicas}
        y = dispatcher.combine(experts(rows.x_MD, rows.ids_MK, rows.weights_MK, **own), rows)
        assert group is None or group.syncs == 1
        y.sum().backward()
    assert y.shape == x.shape
    assert all(t.grad is not None and t.grad.shape == t.shape for t in (x, w, *experts.parameters()))
    assert (rows.replicas is None) == (group is None or replication is None)
    assert group is None or group.syncs == 1


@pytest.mark.parametrize("combine", ["sum", "ordered"])
def test_static_shapes_give_the_same_numbers(combine: CombineMode) -> None:
    """What a device runs, on values: slots beyond the kept ones are padding, and no gradient comes from them."""
    x, ids, w, mask = case("dropped", 0, 1, E, K, D, torch.float32)
    up, down = (torch.randn(E, *s).requires_grad_() for s in ((2 * F, D), (D, F)))

    def run(static: bool) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        d = Dispatcher(E, combine=combine)
        rows = d.dispatch(leaves[0], ids, leaves[1], mask)
        experts = plan_experts(rows.ids_MK, E, static=static)
        kernels = get_backend("grouped_mm" if static else "torch", x.device)
        kernels.weighs_sums = False  # so that both round at the same places
        y = d.combine(
            expert_mlp(rows.x_MD, rows.weights_MK, experts, *expert_weights(up=up, down=down), "swiglu", kernels), rows
        )
        return [y, *torch.autograd.grad(y.square().sum(), [*leaves, up, down])]

    exact = run(static=False)
    original = rows_module.compact
    static_compact = lambda v, k, size=None, static=None: original(v, k, size, static=True)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "compact", static_compact)
        for ours, truth in zip(run(static=True), exact, strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


def twice_on_rank() -> str:
    dispatcher = Dispatcher(E, AllToAll(dist.group.WORLD))
    x, ids, w, _ = case("random", dist.get_rank(), 2, E, K, D, torch.float32)
    x.requires_grad_()
    rows = dispatcher.dispatch(x, ids, w)
    y = dispatcher.combine(rows.x_MD * 2.0, rows)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        dx.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_differentiating_twice_raises_on_every_rank() -> None:
    assert all("once_differentiable" in answer for answer in run_ranks(twice_on_rank, 2))


def test_shapes_are_checked_with_what_was_expected() -> None:
    x, ids, w, _ = case("random", 0, 1, E, K, D, torch.float32)
    dispatcher = Dispatcher(E, layer="moe")
    for bad, message in [
        ((x[0], ids, w, None), r"tokens must be floating \[T, D\]"),
        ((x, ids[1:], w, None), r"expert ids must be int \[11, K >= 1\]"),
        ((x, ids[:, :0], w[:, :0], None), "K >= 1"),
        ((x, ids, w[:, 1:], None), "weights must be floating"),
        ((x, ids, w, torch.ones(11)), "token mask must be bool"),
        ((x.to(torch.float8_e4m3fn), ids, w, None), r"tokens must be floating \[T, D\] in float64, float32"),
        ((x.to_sparse(), ids, w, None), "tokens must be a dense local tensor, got a Tensor of .* in torch.sparse_coo"),
        ((x.to("meta"), ids, w, None), "tokens on meta, expert ids on cpu, weights on cpu"),
    ]:
        with pytest.raises(InputError, match=message):
            dispatcher.dispatch(*bad)
    with pytest.raises(InputError, match=r"expert id outside -1\.\.7"):
        dispatcher.dispatch(x, ids + E, w)
    with pytest.raises(ConfigError, match="combine='max'"):
        Dispatcher(E, combine="max")  # type: ignore[arg-type]
    rows = dispatcher.dispatch(x, ids, w)
    with pytest.raises(InputError, match="combine got 10 rows for the 11"):
        dispatcher.combine(rows.x_MD[1:], rows)


def test_no_branch_on_emptiness_in_the_exchange_the_kernels_and_the_experts() -> None:
    size = r"(numel\(\)|shape\[0\]|size\(0\)|len\([^)]*\))"
    branch = re.compile(
        rf"{size}\s*(==|!=|>|<=)\s*0|if (not )?[\w.]*(numel\(\)|shape\[0\]|size\(0\))\s*(:|and|or|else)"
        r"|\.sum\(\)\s*\*\s*0|\.any\(\)"
    )
    root = Path(trimtab.__file__).parent
    rooms = ("dispatch", "kernels", "experts", "integrations", "parallel", "routing")
    files = [p for room in rooms for p in sorted((root / room).rglob("*.py"))] + [root / "moe.py"]
    assert len(files) > 60
    found = {str(p.relative_to(root)): m[0] for p in files if (m := branch.search(p.read_text()))}
    assert found.keys() == {
        "routing/replay.py",  # what a file of recorded decisions holds: no step of a layer
        "routing/observers.py",  # the same, before a forward is told
        "routing/sequences.py",  # positions that a user gives, once for a batch
        "integrations/megatron/layer.py",  # Megatron's own router cannot reshape the logits of no tokens
    }


def test_the_oracle_is_small_and_stands_alone() -> None:
    source = (Path(trimtab.__file__).parent / "oracle.py").read_text()
    assert len(source.splitlines()) <= 60
    assert "trimtab" not in source


def test_what_is_asserted_on_a_device_names_the_layer() -> None:
    ids, weights, name = torch.zeros(2, K, dtype=torch.int64), torch.ones(2, K), name_bytes("blocks.3")
    assert torch.equal(_checked_on_device(ids, weights, name, E), ids)
    with pytest.raises(
        RuntimeError, match=rf"trimtab: \[layer blocks.3, phase route\] an expert id is outside -1..{E - 1}"
    ):
        _checked_on_device(ids + E, weights, name, E)
