"""What the exchange may cost and must refuse: collectives, host syncs, bad input, ranks out of step."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import trimtab
from helpers.cases import PATTERNS, case
from helpers.ranks import run_ranks
from helpers.weights import expert_weights
from trimtab.dispatch.all_gather import AllGather, all_gather_tensor
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.checks import _checked_on_device, name_bytes
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import COLUMNS
from trimtab.dispatch.host_memory import HostMemory
from trimtab.dispatch.options import COMBINE_MODES, CombineMode
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Handshake, SplitSizes
from trimtab.errors import ConfigError, DesyncError, InputError
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.kernels import rows as rows_module
from trimtab.kernels.choose import get_backend

E, K, D, F = 8, 3, 16, 16
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = (
    "all_to_all_single", ALL_GATHER, "all_reduce", "barrier", "broadcast", "all_gather", "all_to_all", "reduce",
    "reduce_scatter_tensor", "gather", "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv",
    "all_gather_object", "broadcast_object_list", "gather_object",
)  # fmt: skip


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The collectives that this process issues, in order."""
    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def wrap(name: str) -> object:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def run_layer(dispatcher: Dispatcher, x: Tensor, ids: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
    e = dispatcher.experts_per_rank
    up, down = (torch.randn(e, *s, device=x.device, dtype=x.dtype).requires_grad_() for s in ((2 * F, D), (D, F)))
    rows = dispatcher.dispatch(x, ids, w, mask)
    plan = plan_experts(rows.ids_MK, e, num_slots=rows.num_slots)
    kernels = get_backend("auto", x.device)
    y = expert_mlp(rows.x_MD, rows.weights_MK, plan, *expert_weights(up=up, down=down), "swiglu", kernels)
    return dispatcher.combine(y, rows)


def schedule_on_rank(
    transport: type, kinds: list[tuple[CombineMode, bool]]
) -> list[dict[str, tuple[list[str], list[str]]]]:
    warnings.simplefilter("error", FutureWarning)  # this process ends with the test
    turn, every = HostMemory.turn, []
    for combine, guard in kinds:
        dispatcher = Dispatcher(E, transport(dist.group.WORLD, guard=guard), combine=combine)
        found = {}
        for pattern in PATTERNS:
            x, ids, w, mask = case(pattern, dist.get_rank(), dist.get_world_size(), E, K, D, torch.float32)
            with recorded() as forward, pytest.MonkeyPatch.context() as patch:
                patch.setattr(HostMemory, "turn", lambda self, calls=forward: (calls.append("meet"), turn(self)))
                y = run_layer(dispatcher, x.requires_grad_(), ids, w.requires_grad_(), mask)
            with recorded() as backward, pytest.MonkeyPatch.context() as patch:
                patch.setattr(HostMemory, "turn", lambda self, calls=backward: (calls.append("meet"), turn(self)))
                y.square().sum().backward()
            assert x.grad is not None
            assert w.grad is not None
            found[pattern] = (forward, backward)
        every.append(found)
    return every


@pytest.mark.parametrize(
    ("transport", "name", "spread"),
    [(AllToAll, "all_to_all_single", 1), (AllGather, ALL_GATHER, 2), (SharedMemory, "meet", 1)],
)
def test_every_rank_issues_the_same_collectives_whatever_the_routing(transport: type, name: str, spread: int) -> None:
    """Headers, rows out, rows home; and in the backward rows out, rows home. All-gather spreads with an index. Ranks
    that share memory meet as often, and issue no collective.

    With a guard each movement but the first, which has its headers, is announced by one more.
    """
    kinds = list(itertools.product(COMBINE_MODES, (True, False)))
    for every in run_ranks(schedule_on_rank, 4, transport, kinds):
        for (_, guard), found in zip(kinds, every, strict=True):
            if transport is SharedMemory:  # the first call is when the ranks get to know each other
                first = found[PATTERNS[0]][0]
                assert first.pop(0) == "meet"
            expected = ([name] * (2 + spread + guard), [name] * (1 + spread + 2 * guard))
            assert found == dict.fromkeys(PATTERNS, expected)


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


@pytest.mark.parametrize("combine", ["sum", "ordered"])
@pytest.mark.parametrize("transport", [None, OneSync])
def test_nothing_is_read_back_from_a_device_but_the_headers(transport: type | None, combine: CombineMode) -> None:
    """Tensors on `meta` have no values: any read by the host, forward or backward, would raise."""
    group = transport() if transport else None
    x = torch.randn(7, D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    w = torch.rand(7, 2, device="meta", requires_grad=True)
    y = run_layer(
        Dispatcher(E, group, combine=combine), x, torch.zeros(7, 2, dtype=torch.int64, device="meta"), w, None
    )
    assert y.shape == x.shape
    assert group is None or group.syncs == 1
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
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
            expert_mlp(rows.x_MD, rows.weights_MK, experts, *expert_weights(up=up, down=down), "swiglu", kernels),
            rows,
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


WILD = {"id": E, "wild": 2**32, "negative": -2}
FAULTS = (*WILD, "nan", "top_k", "layer", "step")


def refused_on_rank() -> dict[str, tuple[str, str]]:
    rank, said = dist.get_rank(), {}
    transport = AllToAll(dist.group.WORLD)
    for fault in FAULTS:
        guilty = rank == 1 and fault
        layer = "layers.1" if guilty == "layer" else "layers.0"
        dispatcher = Dispatcher(E, transport, layer=layer)
        x, ids, w, _ = case("random", rank, 2, E, 2 if guilty == "top_k" else K, D, torch.float32)
        if guilty in WILD:
            ids[3, 1] = WILD[guilty]
        if guilty == "nan":
            w[3, 1] = float("nan")
        if guilty == "step":
            dispatcher.calls = 5
        with recorded() as calls:
            try:
                dispatcher.dispatch(x, ids, w)
            except (InputError, DesyncError) as error:
                assert calls == ["all_to_all_single"], "data moved before the error"
                said[fault] = (type(error).__name__, str(error))
    return said


def test_bad_input_and_ranks_out_of_step_raise_on_every_rank_before_data_moves() -> None:
    for said in run_ranks(refused_on_rank, 2):
        assert tuple(said) == FAULTS
        for fault, (kind, message) in said.items():
            if fault in (*WILD, "nan"):
                assert kind == "InputError"
                assert re.search(r"layers\.0.*phase route.*rank 1: 1 slot", message)
            else:
                assert kind == "DesyncError"
                assert "are in another call" in message


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
