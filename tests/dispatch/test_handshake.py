"""Control before every movement: what two ranks out of step say of each other, and that no row has moved by then."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from helpers import exchanges
from helpers.cases import case
from helpers.exchanges import RULE, Changed, Layer, Said, said_of
from helpers.ranks import run_ranks
from trimtab.dispatch import dispatcher as dispatcher_module
from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.exchange import count_message
from trimtab.dispatch.facts import (
    BAD,
    COLUMNS,
    MOVEMENT,
    MOVEMENTS,
    NO_FACTS,
    PLAN,
    UNFIT,
    UNUSABLE,
    CallId,
    Facts,
    LineTokens,
    _call_in_words,
    compare,
)
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.route import Dispatched
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Handshake
from trimtab.errors import DesyncError, InputError, TrimtabError
from trimtab.routing.recompute import replay_in_recompute

E, K, D, RANKS = 6, 2, 8, 3
NAME = "model.layers.11.mlp.experts.of.a.long.name"
TRANSPORTS = [AllToAll, AllGather, SharedMemory]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "int32": Tensor.int, "complex": lambda y: y + 0j, "float8": lambda y: y.to(torch.float8_e5m2),
    "scalar": Tensor.sum, "of width 0": lambda y: y[:, :0], "sparse": Tensor.to_sparse, "meta": lambda y: y.to("meta"),
    "nested": lambda y: torch.nested.nested_tensor(list(y)),
    "nested, jagged": lambda y: torch.nested.nested_tensor(list(y), layout=torch.jagged),
    "DTensor": lambda y: DTensor.from_local(y, DeviceMesh.from_group(dist.group.WORLD, "cpu"), run_check=False),
}  # fmt: skip
"""Tensors that no rank can send."""


def call(
    over: dict[bool, Any], *, guard: bool, experts: int = E, combine: Any = "sum", fingerprint: str = "hidden 16",
    layer: str = NAME, replication: ReplicationConfig | None = None, number: int = 0, changed: str = "",
    given: Callable[..., tuple[Any, ...]] = lambda *given: given, facts: Facts = NO_FACTS,
) -> Dispatched:  # fmt: skip
    """One dispatch. given: makes of tokens, ids, weights and mask what this rank hands in."""
    transport = Changed(over[guard], changed) if changed else over[guard]
    options: dict[str, Any] = {"combine": combine, "fingerprint": fingerprint, "layer": layer}
    dispatcher = Dispatcher(experts, transport, replication=replication, **options)
    dispatcher.calls = number
    inputs = given(*case("masked", dist.get_rank(), RANKS, E, K, D, torch.float32))
    return dispatcher._dispatch(*inputs, facts=facts) if facts.weights else dispatcher.dispatch(*inputs)


def of(**changes: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """What a rank hands in where some of it is another."""

    def given(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = zip(("x", "ids", "w", "mask"), tensors, strict=True)
        return tuple(changes.get(name, lambda t: t)(t) for name, t in named)

    return {"given": given}


def put(value: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t.index_put((torch.arange(len(t)), torch.tensor(0)), torch.tensor(value).to(t.dtype))


UNUSABLE_GIVEN = {
    "x [1, T, D]": of(x=lambda x: x[None]), "ids [T - 1, K]": of(ids=lambda ids: ids[1:]), "int w": of(w=Tensor.long),
    "float mask": of(mask=Tensor.float), "float8 w": of(w=KINDS["float8"]), "sparse mask": of(mask=Tensor.to_sparse),
    "meta mask": of(mask=KINDS["meta"]), **{f"{kind} x": of(x=make) for kind, make in KINDS.items()},
    **{f"{kind} ids": of(ids=make) for kind, make in KINDS.items() if kind != "int32"},
}  # fmt: skip
WILD = {"id": of(ids=put(E)), "wild id": of(ids=lambda ids: put(2**32)(ids)), "id -2": of(ids=put(-2)),
        "nan": of(w=put(float("nan")))}  # fmt: skip
FINGERPRINT, REPLICATED = r"rank 1: .*with another dtype, combine, guard or fingerprint", {"replication": RULE}
Row = tuple[str, str, dict[str, Any], dict[str, Any]]
CALLS: dict[str, Row] = {
    "experts": ("Desync", r"rank 1: count forward of .*\(12 experts, top-2, width 8\)", {"experts": 2 * E}, {}),
    "fingerprint": ("Desync", FINGERPRINT + r".*\(torch.float32,.* hidden (16|24)\)", {"fingerprint": "hidden 24"}, {}),
    "combine": ("Desync", FINGERPRINT, {"combine": "ordered"}, {}), "guard": ("Desync", FINGERPRINT, {}, {}),
    "tokens": ("Desync", FINGERPRINT, of(x=Tensor.double), {}),
    "top_k": ("Desync", "top-1", of(ids=lambda ids: ids[:, :1], w=lambda w: w[:, :1]), {}),
    "name": ("Desync", r"rank 1: count forward of layer …\S+of.a.long.name.b, call 0", {"layer": f"{NAME}.b"}, {}),
    "step": ("Desync", r"rank 1: .*name, call 5", {"number": 5}, {}),
    **{name: ("Input", "must be|wrong shape or dtype", wrong, {}) for name, wrong in UNUSABLE_GIVEN.items()},
    **{name: ("Input", r"phase route\].*rank 1: \d+ slot", wrong, {}) for name, wrong in WILD.items()},
    "good": ("nothing", "", {}, {}),
    "copy_cost": ("Desync", r"rank 1: (route|count) forward of .*, call 0 .*another dtype.* or fingerprint",
                  {"replication": ReplicationConfig(copy_cost=3)}, REPLICATED),
    "tolerance": ("Desync", r"another dtype.* or fingerprint.*ReplicationConfig\(tolerance=",
                  {"replication": ReplicationConfig(copy_cost=2, tolerance=0.25)}, REPLICATED),
    "off": ("Desync", r"rank 0: route forward of .*rank 1: count forward of ", {"replication": None}, REPLICATED),
    "on": ("Desync", r"rank 0: count forward of .*rank 1: route forward of ", REPLICATED, {}),
    "more experts": ("Desync", r"rank 1: route forward of .*, call 0 \(12 experts", {"experts": 2 * E}, REPLICATED),
    "other weights": ("Desync", r"hold other experts than rank \d \(call \d\), which has \(up",
                      {"facts": Facts("up")}, REPLICATED | {"facts": Facts("up, down")}),
    "good weights": ("nothing", "", {}, REPLICATED | {"facts": Facts("up, down")}),
    "sent": ("Desync", r"rank\(s\) 1 have other numbers of slots for each expert than those that were gathered",
             {"changed": "sent"}, REPLICATED),
    "received": ("Desync", "place replicas of experts by another plan", {"changed": "received"}, REPLICATED),
    **{f"replicated, {name}": ("Input", "", wrong, REPLICATED) for name, wrong in (UNUSABLE_GIVEN | WILD).items()},
    "good at last": ("nothing", "", {}, REPLICATED),
}  # fmt: skip
"""By name: the error, what is said, and what rank 1 does otherwise than all others do."""


def calls_on_rank(kind: Any, guard: bool) -> dict[str, Said]:
    over, guilty = {on: kind(dist.group.WORLD, guard=on) for on in (True, False)}, dist.get_rank() == 1
    for on in over:  # the ranks of either meet
        call(over, guard=on)
    found = {}
    for name, (_, _, wrong, alike) in CALLS.items():
        other = guilty and name == "guard" and kind is not SharedMemory  # which has memory of its own for each
        options = {"guard": guard != other} | alike | (wrong if guilty else {})
        found[name] = said_of(lambda options=options: call(over, **options))
    return found


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_one_rank_does_otherwise_is_named_on_every_rank(transport: type, guard: bool) -> None:
    """The last mistake is found as well as the first: nothing is left over in the group between them."""
    everyone = run_ranks(calls_on_rank, RANKS, transport, guard, deadline=60.0)
    for rank, found in enumerate(everyone):
        for name, (kind, says, _, alike) in CALLS.items():
            said = found[name]
            kind = "nothing" if name == "guard" and transport is SharedMemory else kind
            assert said.kind.removesuffix("Error") == kind, (rank, name, said)
            assert kind == "nothing" or re.search(says, said.message, re.DOTALL), (rank, name, said)
            theirs = (0, 2) if rank == 1 and kind == "Desync" and name != "sent" else (1,)
            assert said.ranks == (() if kind == "nothing" else theirs), (rank, name, said)
            assert said.calls == everyone[0][name].calls, "ranks have issued different collectives"
            moves = transport is AllToAll and kind != "nothing" and alike.get("replication") is None and name != "on"
            assert not moves or said.calls == ["all_to_all_single"], "data moved before the error"


Change = Callable[[Tensor], Tensor]
MADE: dict[str, tuple[Change, Change]] = {
    "rows": (Tensor.clone, lambda y: y[1:]), "dtype": (Tensor.clone, Tensor.double),
    "half": (Tensor.half, Tensor.bfloat16), "flat": (Tensor.clone, Tensor.flatten),
    "narrow": (Tensor.half, lambda y: y.half()[:, :-1]),  # rows are padded to the same bytes
    **{kind: (Tensor.clone, make) for kind, make in KINDS.items()},
}  # fmt: skip
"""What all make of their rows, and what rank 1 makes of its own."""
ALONE = ("Input", r"layer a, rank 1, phase combine")
MISTAKES: dict[str, tuple[str, str]] = {
    "order": ("Desync", r"layer (a|b), rank.*rank 1: route forward of layer b.*rank 2: count forward of layer a"),
    "rows": ALONE, "flat": ALONE, **dict.fromkeys(KINDS, ALONE),
    "dtype": ("Desync", r"phase combine.*rows of 8 float32, 8 float64, 8 float32 come from ranks 0\.\.2"),
    "half": ("Desync", r"phase combine.*rows of 8 float16, 8 bfloat16, 8 float16 come from ranks 0\.\.2"),
    "narrow": ("Desync", r"phase combine.*rows of 8 float16, 7 float16, 8 float16 come from ranks 0\.\.2"),
    "swapped routes": ("Desync", r"rank 1: combine forward of layer b.*rank 2: combine forward of layer a"),
    "no backward": ("Desync", r"rank 1: count forward of layer a, call \d.*rank 2: combine backward of layer a"),
    "weights": ("Desync", r"phase experts\] rows of 4 float32, 5 float32, 4 float32 come from .*\(forward.*weights"),
    "gradients": ("Desync", r"phase experts\] rows of 5 float32, 4 float32, 5 float32 come from .*\(backward.*weights"),
    "dtypes": ("Desync", r"phase experts\] .*of 8 values of kind (\w+), 8 values of kind (\w+), 8 values of kind \1"),
    "nothing": ("nothing", ""),
}  # fmt: skip


def both_layers(d: list[Dispatcher], guilty: bool, what: str) -> None:
    """Two layers on one guard, with one mistake on the guilty rank."""
    x, ids, w, _ = case("random", dist.get_rank(), RANKS, E, K, D, torch.float32)
    order = d[::-1] if guilty and what == "order" else d
    rows = {one.layer: one.dispatch(x.requires_grad_(), ids, w) for one in order}
    replicas, width = rows["b"].replicas, 5 if guilty else 4
    assert replicas is not None
    if what == "weights":
        replicas.send([torch.zeros(E // RANKS, width)])
    if what == "gradients":
        replicas.add_home([torch.zeros(replicas.number, 9 - width)], [torch.zeros(E // RANKS, 9 - width)])
    if what == "dtypes":
        replicas.send([torch.zeros(2, 4), torch.zeros(2, 4).to(torch.uint8 if guilty else torch.int8)])
    y = MADE.get(what, (Tensor.clone,) * 2)[guilty](rows["a"].x_MD * 2)
    if guilty and what == "swapped routes":
        d[0].combine(rows["b"].x_MD, rows["b"])
    out = d[0].combine(y, rows["a"])
    if guilty and what == "no backward":
        d[0].dispatch(x, ids, w)
    out.sum().backward()


def mistakes_on_rank(transport: type) -> dict[str, Said]:
    made, guilty = transport(dist.group.WORLD), dist.get_rank() == 1

    def again(what: str) -> Said:
        d = [Dispatcher(E, made, layer="a"), Dispatcher(E, made, layer="b", replication=RULE)]
        return said_of(lambda: both_layers(d, guilty, what))

    return {what: again(what) for what in MISTAKES}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_mistake_between_dispatch_and_backward_is_named_on_every_rank(transport: type) -> None:
    everyone = run_ranks(mistakes_on_rank, RANKS, transport, deadline=30.0)
    for what, (kind, says) in MISTAKES.items():
        for rank, found in enumerate(everyone):
            assert found[what].kind.removesuffix("Error") == kind, (what, rank, found[what])
            if rank != 1 or kind == "Desync":
                assert re.search(says, found[what].message, re.DOTALL), (what, rank, found[what])
            assert found[what].calls == everyone[0][what].calls, "ranks have issued different collectives"


def asked_on_rank() -> list[Said]:
    """A backward that is asked for less on one rank: for no gradient of the rows, then for none of the weights."""
    layer = Layer(AllToAll(dist.group.WORLD), "sum", RULE)
    x, ids, w, _ = case("one_rank", dist.get_rank(), 2, exchanges.E, K, exchanges.D, torch.float64)
    x, params, found = x.requires_grad_(), list(layer.parameters()), []
    for less in (params, [x], [x, *params]):
        y = layer(x, ids, w, None).sum()
        asked = less if dist.get_rank() == 1 else [x, *params]
        found.append(said_of(lambda y=y, asked=asked: torch.autograd.grad(y, asked)))
    return found


def test_a_backward_that_is_asked_for_less_on_one_rank_is_named_on_every_rank() -> None:
    for rank, (no_rows, no_weights, all_of_it) in enumerate(run_ranks(asked_on_rank, 2, deadline=30.0)):
        for said in (no_rows, no_weights):
            assert said[:2] == ("DesyncError", (1 - rank,)), said
            assert said.calls == ["all_to_all_single"] * 3, "the rows of the combine, and no others, have moved"
        assert "or what a backward is asked for, differs between ranks" in no_rows.message
        assert "rank 1: dispatch backward" in no_weights.message
        assert all_of_it.kind == "nothing"


def undecided_on_rank() -> Said:
    """A block whose router, not one of ours, takes another expert when it runs again, on one rank."""
    dispatcher, runs = Dispatcher(E, AllToAll(dist.group.WORLD), layer="moe", replication=RULE), [0]
    x, ids, w, _ = case("one_rank", dist.get_rank(), RANKS, E, K, D, torch.float32)

    def block(x: Tensor) -> Tensor:
        runs[0] += 1
        other = runs[0] == 2 and dist.get_rank() == 1
        rows = dispatcher.dispatch(x, (ids + 1) % E if other else ids, w)
        return dispatcher.combine(rows.x_MD.exp(), rows)

    y = checkpoint(block, x.requires_grad_(), use_reentrant=False, context_fn=replay_in_recompute)
    return said_of(lambda: y.sum().backward())


def test_a_block_that_decides_otherwise_when_run_again_is_named_on_every_rank() -> None:
    for said in run_ranks(undecided_on_rank, RANKS):
        assert said[:2] == ("DesyncError", (1,))
        assert re.search(r"rank\(s\) 1 have other numbers of slots.*`trimtab.replay_in_recompute`", said.message)


def sizes_on_rank(make: Callable[..., Any], combine: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher_module, "static_by_default", lambda t: True)  # as on a device
        dispatcher = Dispatcher(E, make(dist.group.WORLD), combine=combine, sizes=True)
        for inputs in (
            case(kind, dist.get_rank(), RANKS, E, K, D, torch.float32) for kind in ("masked", "empty_source")
        ):
            rows = dispatcher.dispatch(*inputs)
            assert rows.sizes_e == torch.bincount(rows.ids_MK[rows.ids_MK >= 0], minlength=E // RANKS).tolist()
            assert sum(rows.sizes_e) == rows.num_slots
            dispatcher.combine(rows.x_MD, rows)


@pytest.mark.parametrize("combine", ["sum", "ordered"])
@pytest.mark.parametrize("make", TRANSPORTS)
def test_the_slots_of_each_expert_come_with_the_counts(make: Callable[..., Any], combine: str) -> None:
    run_ranks(sizes_on_rank, RANKS, make, combine)


CALL = CallId(layer="a", number=3, experts=6, top_k=2, width=8, fingerprint="")


def test_a_tag_names_its_layer_by_the_end_of_the_name() -> None:
    call_id = CallId(layer="x" * 50 + "é.11", number=3, experts=6, top_k=2, width=8, fingerprint="")
    message = count_message(torch.tensor([1, 2]), call_id, {})
    assert message.shape == (2, COLUMNS)
    for phase, direction in MOVEMENTS:
        assert MOVEMENTS[call_id.columns(phase, direction)[0]] == (phase, direction)
        assert call_id.columns(phase, direction)[1:] == call_id.columns("count", "forward")[1:]
    assert message[:, MOVEMENT:].tolist() == [call_id.columns("count", "forward")] * 2, "the same for every peer"


def test_sizes_behind_a_tag_are_no_part_of_its_name() -> None:
    call_id = CallId(layer="a", number=3, experts=4, top_k=2, width=8, fingerprint="", sized=2)
    row = count_message(torch.tensor([1, 2]), call_id, {COLUMNS: torch.tensor([[3, 70], [80, 90]])})[1].tolist()
    assert row[COLUMNS:] == [80, 90]
    assert _call_in_words(row, row) == "count forward of layer a, call 3 (4 experts, top-2, width 8)"


def met(*given: dict[str, Any]) -> Handshake:
    """What rank 0 of so many has sent to all, and received."""

    def message(bad: int = 0, plan: int = 0, facts: Facts = NO_FACTS, number: int = 3) -> list[int]:
        call_id = CallId(layer="a", number=number, experts=6, top_k=2, width=8, fingerprint="", sized=2)
        values: dict[int, Tensor | int] = {BAD: bad, PLAN: torch.tensor(plan), COLUMNS: torch.tensor([[65, 66]])}
        row: list[int] = count_message(torch.tensor([1]), call_id, values, facts)[0].tolist()
        return row

    messages = [message(**each) for each in given]
    return Handshake(sent=[messages[0]] * len(messages), received=messages, everyone=[])


ROWS_OF_THE_TABLE: dict[str, tuple[dict[str, Any], str]] = {
    "bad": ({"bad": UNUSABLE, "number": 4}, r"rank\(s\) 1 were given tensors of the wrong shape"),
    "call": (
        {"number": 4, "facts": Facts("other")},
        r"rank\(s\) 1 are in another call than rank 0.*layer a, call 3.*layer a, call 4",
    ),
    "weights": ({"facts": Facts("other"), "plan": 5}, r"rank\(s\) 1 hold other experts than rank 0"),
    "slots": ({"plan": UNFIT}, r"rank\(s\) 1 have other numbers of slots"),
    "plan": ({"plan": 5, "facts": Facts(tp_tokens=LineTokens(0, 2))}, r"rank\(s\) 1 place replicas of experts by"),
    "tp": ({"facts": Facts(tp_tokens=LineTokens(0, 2, 4))}, r"one tp_mesh that must hold the same tokens .*2 sequence"),
    "cp": ({"facts": Facts(cp_tokens=LineTokens(0, 2))}, r"one cp_mesh that must share sequences"),
}


@pytest.mark.parametrize("what", ROWS_OF_THE_TABLE)
def test_facts_are_compared_in_the_order_of_their_table(what: str) -> None:
    wrong, says = ROWS_OF_THE_TABLE[what]
    tp, cp = LineTokens(0, 1, 4), LineTokens(0, 1)
    mine = {"facts": Facts(tp_tokens=tp if what == "tp" else None, cp_tokens=cp if what == "cp" else None)}
    compare(met(mine, mine), 0, CALL, "count")
    others = Facts(tp_tokens=LineTokens(2, 9), cp_tokens=LineTokens(2, 9))  # of another line: nothing to compare
    compare(met({"facts": Facts(tp_tokens=tp, cp_tokens=cp)}, {"facts": others}), 0, CALL, "count")
    with pytest.raises(TrimtabError, match=says) as caught:
        compare(met(mine, wrong), 0, CALL, "count")
    assert type(caught.value) is (InputError if what == "bad" else DesyncError)
