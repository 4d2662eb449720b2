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

from dispatch.test_schedule import recorded
from helpers.cases import case
from helpers.ranks import run_ranks
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
    compare,
)
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import Handshake
from trimtab.errors import DesyncError, InputError, TrimtabError

E, K, D, RANKS = 6, 2, 8, 3

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "int32": Tensor.int, "complex": lambda y: y + 0j, "float8": lambda y: y.to(torch.float8_e5m2),
    "scalar": Tensor.sum, "of width 0": lambda y: y[:, :0], "sparse": Tensor.to_sparse, "meta": lambda y: y.to("meta"),
    "nested": lambda y: torch.nested.nested_tensor(list(y)),
    "nested, jagged": lambda y: torch.nested.nested_tensor(list(y), layout=torch.jagged),
    "DTensor": lambda y: DTensor.from_local(y, DeviceMesh.from_group(dist.group.WORLD, "cpu"), run_check=False),
}  # fmt: skip
"""Tensors that no rank can send."""


def both_layers(d: list[Dispatcher], guilty: bool, what: str) -> None:
    """Two layers on one guard, with one mistake on the guilty rank."""
    x, ids, w, _ = case("random", dist.get_rank(), RANKS, E, K, D, torch.float32)
    x.requires_grad_()
    rows = [one.dispatch(x, ids, w) for one in (d[::-1] if guilty and what == "order" else d)]
    if guilty and what == "order":
        rows.reverse()
    y = [r.x_MD * 2 for r in rows]
    if guilty and what == "rows":
        y[0] = y[0][1:]
    if guilty and what == "dtype":
        y[0] = y[0].double()
    if what == "half":
        y[0] = y[0].to(torch.bfloat16 if guilty else torch.float16)
    if what == "narrow":
        y[0] = y[0].half()[:, : D - guilty]  # rows are padded to the same bytes
    if guilty and what == "flat":
        y[0] = y[0].reshape(-1)
    if guilty and what in KINDS:
        y[0] = KINDS[what](y[0])
    if guilty and what == "swapped routes":
        d[0].combine(rows[1].x_MD, rows[1])
    out = d[0].combine(y[0], rows[0])
    if guilty and what == "no backward":
        d[0].dispatch(x, ids, w)
    (out.sum() + d[1].combine(y[1], rows[1]).sum() if what == "combine" else out.sum()).backward()


MISTAKES: dict[str, tuple[type[TrimtabError], str]] = {
    "order": (
        DesyncError,
        r"layer (a|b), rank.*rank 1: count forward of layer b, call \d.*rank 2: count forward of layer a",
    ),
    "rows": (InputError, r"layer a, rank 1, phase combine"),
    "dtype": (DesyncError, r"phase combine.*rows of 8 float32, 8 float64, 8 float32 come from ranks 0\.\.2"),
    "half": (DesyncError, r"phase combine.*rows of 8 float16, 8 bfloat16, 8 float16 come from ranks 0\.\.2"),
    "narrow": (DesyncError, r"phase combine.*rows of 8 float16, 7 float16, 8 float16 come from ranks 0\.\.2"),
    "flat": (InputError, r"layer a, rank 1, phase combine"),
    "swapped routes": (DesyncError, r"rank 1: combine forward of layer b.*rank 2: combine forward of layer a"),
    **dict.fromkeys(KINDS, (InputError, r"layer a, rank 1, phase combine")),
    "no backward": (DesyncError, r"rank 1: count forward of layer a, call \d.*rank 2: combine backward of layer a"),
}


def mistakes_on_rank(transport: type) -> dict[str, tuple[str, str, list[str]]]:
    group = dist.group.WORLD
    found = {}
    made = transport(group)
    for what in MISTAKES:
        d = [Dispatcher(E, made, layer=name) for name in ("a", "b")]
        with recorded() as calls:
            try:
                both_layers(d, dist.get_rank() == 1, what)
                found[what] = ("nothing", "", calls)
            except TrimtabError as error:
                found[what] = (type(error).__name__, str(error), calls)
    return found


@pytest.mark.parametrize("transport", [AllToAll, AllGather, SharedMemory])
def test_each_mistake_of_one_rank_is_named_on_every_rank_and_the_group_lives_on(transport: type) -> None:
    """The last mistake is found as well as the first: nothing is left over in the group between them."""
    everyone = run_ranks(mistakes_on_rank, RANKS, transport, deadline=30.0)
    for what, (kind, says) in MISTAKES.items():
        for rank, found in enumerate(everyone):
            name, message, calls = found[what]
            assert name == kind.__name__, (what, rank, name, message)
            if rank != 1 or kind is DesyncError:
                assert re.search(says, message, re.DOTALL), (what, rank, message)
            assert calls == everyone[0][what][2], "ranks have issued different collectives"


def facts_on_rank(kinds: list[str]) -> list[str]:
    group, guilty = dist.group.WORLD, dist.get_rank() == 1
    x, ids, w, _ = case("random", dist.get_rank(), RANKS, E, K, D, torch.float32)
    said = []
    for kind in kinds:
        wrong = guilty and kind
        d = Dispatcher(
            2 * E if wrong == "experts" else E,
            AllToAll(group, guard=wrong != "guard"),
            combine="ordered" if wrong == "combine" else "sum",
            fingerprint="hidden 24" if wrong == "fingerprint" else "hidden 16",
            layer="model.layers.11.mlp.experts.of.a.long.name" + (".b" if wrong == "name" else ""),
        )
        try:
            d.dispatch(
                x.double() if wrong == "tokens" else x, ids[:, :1] if wrong == "top_k" else ids, w[:, : ids.shape[1]]
            )
            said.append("nothing")
        except (DesyncError, InputError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


CONFIGS = {
    "experts": r"rank 1: count forward of .*\(12 experts, top-2, width 8\)",
    "fingerprint": r"rank 1: .*fingerprint.*rank 2: .*hidden 16|rank 1: .*rank 2: .*fingerprint.*hidden 24",
    "combine": r"fingerprint",
    "guard": r"fingerprint",
    "tokens": r"fingerprint",
    "name": r"rank 1: count forward of layer …\S+\.of\.a\.long\.name\.b, call 0",
}


def test_another_configuration_on_one_rank_is_named_on_every_rank() -> None:
    for rank, said in enumerate(run_ranks(facts_on_rank, RANKS, list(CONFIGS), deadline=30.0)):
        for what, message in zip(CONFIGS, said, strict=True):
            assert message.startswith("DesyncError"), (rank, what, message)
            assert re.search(CONFIGS[what], message, re.DOTALL), (rank, what, message)


def unusable_on_rank(guilty_rank: int) -> list[str]:
    group, guilty = dist.group.WORLD, dist.get_rank() == guilty_rank
    d = Dispatcher(E, AllToAll(group))
    x, ids, w, mask = case("masked", dist.get_rank(), RANKS, E, K, D, torch.float32)
    wrong: list[Callable[[], tuple[Tensor, ...]]] = [
        lambda: (x[None], ids, w, mask), lambda: (x, ids[1:], w, mask), lambda: (x, ids, w.long(), mask),
        lambda: (x, ids, w, mask.float()), lambda: (x, ids, w.to(torch.float8_e5m2), mask),
        *(lambda kind=kind: (kind(x), ids, w, mask) for kind in KINDS.values()),
        *(lambda kind=kind: (x, kind(ids), w, mask) for name, kind in KINDS.items() if name != "int32"),
        lambda: (x, ids, w, mask.to_sparse()), lambda: (x, ids, w, mask.to("meta")), lambda: (x, ids, w, mask),
    ]  # fmt: skip
    said = []
    for make in wrong:
        try:
            d.dispatch(*(make() if guilty else (x, ids, w, mask)))
            said.append("nothing")
        except InputError as error:
            said.append(f"{error.ranks} {error}")
    return said


def test_a_wrong_shape_on_one_rank_raises_on_every_rank_and_the_group_lives_on() -> None:
    everyone = run_ranks(unusable_on_rank, RANKS, 2, deadline=30.0)
    for rank, said in enumerate(everyone):
        assert said[-1] == "nothing"
        for message in said[:-1]:
            assert message.startswith("(2,)"), (rank, message)
            assert ("must be" if rank == 2 else "wrong shape or dtype") in message


def test_a_tag_names_its_layer_by_the_end_of_the_name() -> None:
    call_id = CallId(layer="x" * 50 + "é.11", number=3, experts=6, top_k=2, width=8, fingerprint="")
    rows = torch.tensor([1, 2])
    message = count_message(rows, call_id, {})
    assert message.shape == (2, COLUMNS)
    for phase, direction in MOVEMENTS:
        assert MOVEMENTS[call_id.columns(phase, direction)[0]] == (phase, direction)
        assert call_id.columns(phase, direction)[1:] == call_id.columns("count", "forward")[1:]
    assert message[:, MOVEMENT:].tolist() == [call_id.columns("count", "forward")] * 2, "the same for every peer"


def met(*messages: list[int]) -> Handshake:
    """What rank 0 of so many has sent to all, and received."""
    return Handshake(sent=[messages[0]] * len(messages), received=list(messages), everyone=[])


def message(bad: int = 0, plan: int = 0, facts: Facts = NO_FACTS, number: int = 3) -> list[int]:
    call_id = CallId(layer="a", number=number, experts=6, top_k=2, width=8, fingerprint="")
    found: list[int] = count_message(torch.tensor([1]), call_id, {BAD: bad, PLAN: torch.tensor(plan)}, facts)[
        0
    ].tolist()
    return found


ROWS_OF_THE_TABLE: dict[str, tuple[dict[str, Any], str]] = {
    "bad": ({"bad": UNUSABLE, "number": 4}, r"rank\(s\) 1 were given tensors of the wrong shape"),
    "call": ({"number": 4, "facts": Facts("other")}, r"rank\(s\) 1 are in another call than rank 0.*call 3.*call 4"),
    "weights": ({"facts": Facts("other"), "plan": 5}, r"rank\(s\) 1 hold other experts than rank 0"),
    "slots": ({"plan": UNFIT}, r"rank\(s\) 1 have other numbers of slots"),
    "plan": ({"plan": 5, "facts": Facts(tp_tokens=LineTokens(0, 2))}, r"rank\(s\) 1 place replicas of experts by"),
    "tp": ({"facts": Facts(tp_tokens=LineTokens(0, 2, 4))}, r"one tp_mesh that must hold the same tokens .*2 sequence"),
    "cp": ({"facts": Facts(cp_tokens=LineTokens(0, 2))}, r"one cp_mesh that must share sequences"),
}


@pytest.mark.parametrize("what", ROWS_OF_THE_TABLE)
def test_facts_are_compared_in_the_order_of_their_table(what: str) -> None:
    wrong, says = ROWS_OF_THE_TABLE[what]
    alike = Facts(tp_tokens=LineTokens(0, 1, 4), cp_tokens=LineTokens(0, 1))
    mine = Facts(
        tp_tokens=alike.tp_tokens if what == "tp" else None, cp_tokens=alike.cp_tokens if what == "cp" else None
    )
    call_id = CallId(layer="a", number=3, experts=6, top_k=2, width=8, fingerprint="")
    compare(met(message(facts=mine), message(facts=mine)), 0, call_id, "count")
    others = Facts(tp_tokens=LineTokens(2, 9), cp_tokens=LineTokens(2, 9))  # of another line: nothing to compare
    compare(met(message(facts=alike), message(facts=others)), 0, call_id, "count")
    with pytest.raises(TrimtabError, match=says) as caught:
        compare(met(message(facts=mine), message(**wrong)), 0, call_id, "count")
    assert type(caught.value) is (InputError if what == "bad" else DesyncError)
