"""`python -m benchmarks imbalance`: an experts layer over 2 ranks of one thread, however unevenly tokens fall.

Forward and backward of one layer: *plain*, trimtab's expert parallelism; *replicated*, the same with hot experts copied
for one call, "auto" or by a tolerance; and transformers' own `all_to_all`, which goes through Gloo and stands beside
both transports. Slots are those of each rank, before and after. Ratios above 1.00 mean that replicated is faster; where
there is nothing to copy, 1 over the ratio is what planning costs. Before the race the output and all gradients of every
workload are compared with plain formulas.

Legend: T tokens of a rank, K experts per token, D model dim, F expert hidden dim, E experts, e experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contestant import Contestant, Role
from benchmarks.exchange import DIRECT
from benchmarks.layer_builds import qwen_layer
from benchmarks.layer_case import LayerCase, expert_weights
from benchmarks.layer_step import Layer, layer_subject
from benchmarks.layer_truth import BOUNDS, compare, truth
from benchmarks.result import Entry, Record
from benchmarks.subject import BOTH, Subject, Where
from benchmarks.table import ratio, timed_words
from benchmarks.task import Task
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import Facts
from trimtab.dispatch.options import COPY_COST, ExchangeOptions, Replication
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.experts.module import ExpertMLP

RANKS = 2
PLAIN: Replication = "off"
PEER = "all_to_all"
UNEVEN = ("hot_rank", "hot", "balanced", "spread", "rotating")
"""The workloads that are raced if no others are named: two with much to copy, three with nothing."""


def imbalance_task(
    shape: tuple[int, int, int, int],
    *,
    tokens: int,
    dtype: str,
    workloads: Sequence[str] = UNEVEN,
    transports: Sequence[str] = DIRECT,
    ways: Sequence[Replication] = ("auto",),
    copy_cost: int = COPY_COST,
) -> Task:
    """Every workload is a mode of the same contestants. Raises ConfigError for sizes or ways that do not fit."""
    case = LayerCase.shaped(shape, tokens=tokens, dtype=dtype, ranks=RANKS)
    for way in ways:
        ExchangeOptions(replicate_experts=way, copy_cost=copy_cost)

    def made(name: str, role: Role, transport: str = "", way: Replication = PLAIN) -> Contestant:
        args = {"workloads": list(workloads), "transport": transport, "replicate_experts": way, "copy_cost": copy_cost}
        return Contestant(
            name=name, role=role, group=transport, build=f"{__name__}:build", args=case.as_args(**args), ranks=RANKS
        )

    contestants = [
        made(f"{_word(way)} {transport}", "ours", transport, way) for transport in transports for way in [PLAIN, *ways]
    ]
    described = {"shape": list(shape), "dtype": dtype, "tokens": tokens, "threads": 1, "ranks": RANKS}
    return Task(
        part="imbalance",
        case=described | {"copy_cost": copy_cost},
        contestants=[*contestants, made(PEER, "peer")],
        modes=list(workloads),
        make_judge=imbalance_judge,
    )


def _word(way: Replication) -> str:
    return "plain" if way == PLAIN else f"replicated {way}"


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: the case, `workloads`, `transport` ("" for transformers' own), `replicate_experts` and `copy_cost`.

    Every workload is run once, so that its slots are known: every rank builds.
    """
    case = LayerCase.of(args)
    dispatcher = None
    if args["transport"]:
        dispatcher = Dispatcher(
            case.num_experts,
            TRANSPORTS[args["transport"]](dist.group.WORLD),
            replication=ExchangeOptions(
                replicate_experts=args["replicate_experts"], copy_cost=args["copy_cost"]
            ).replication,
        )
        layer, weights = _own_layer(case, dispatcher, where.rank)
    else:
        layer, weights = qwen_layer(case, PEER, where)
    subjects: dict[str, Subject] = {}
    facts: dict[str, str] = {}
    for workload in args["workloads"]:
        subjects[workload] = layer_subject(layer, replace(case, workload=workload), where.rank, weights)
        if dispatcher is not None and dispatcher.replication is not None:
            subjects[workload].modes[BOTH]()
            facts[workload] = _slots(dispatcher)

    def outcome() -> dict[str, Tensor]:
        return {
            f"{workload}: {name}": value
            for workload, subject in subjects.items()
            if subject.outcome is not None
            for name, value in subject.outcome().items()
        }

    modes: dict[str, Callable[[], object]] = {workload: each.modes[BOTH] for workload, each in subjects.items()}
    return Subject(modes=modes, outcome=outcome, facts=facts)


def _own_layer(case: LayerCase, dispatcher: Dispatcher, rank: int) -> tuple[Layer, list[Tensor]]:
    gate_up, down = expert_weights(case, rank)
    experts = ExpertMLP(down.shape[0], case.dim, case.hidden, dtype=case.torch_dtype, device="meta")
    experts.gate_up = torch.nn.Parameter(gate_up.view(-1, 2, case.hidden, case.dim))
    experts.down = torch.nn.Parameter(down)

    def layer(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        facts = Facts(dispatcher.weights_fact(experts))
        rows = dispatcher._dispatch(x_TD, ids_TK, w_TK, facts=facts)
        out = experts(rows.x_MD, rows.ids_MK, rows.weights_MK, **rows.known)
        return dispatcher.combine(out, rows)

    return layer, [experts.gate_up, experts.down]


def _slots(dispatcher: Dispatcher) -> str:
    """As in "8192 0 | 4096 4096 | 2": of each rank without replicas, with them, and how many replicas there are."""
    report = dispatcher.replicated
    assert report is not None
    before, after = (" ".join(map(str, t.tolist())) for t in (report.loads_before_P, report.loads_after_P))
    return f"{before} | {after} | {int(report.replicas_P.sum())}"


def imbalance_judge() -> Callable[[Contestant, list[dict[str, Tensor]]], str | None]:
    """A judge of all workloads. The truth of each is computed once."""
    known: dict[LayerCase, list[dict[str, Tensor]]] = {}

    def judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
        for workload in contestant.args["workloads"]:
            case = replace(LayerCase.of(contestant.args), workload=workload)
            if case not in known:
                known[case] = [
                    {f"{workload}: {name}": value for name, value in rank.items()} for rank in truth(case)
                ]  # fmt: skip
            if (wrong := compare(outcomes, known[case], BOUNDS[case.dtype])) is not None:
                return wrong
        return None

    return judge


def imbalance_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one for each workload, transport, way to replicate and setting of malloc."""
    header = ["workload", "transport", "replicate", "slots", "replicated slots", "replicas", "plain (middle half)",
              "replicated (middle half)", "plain : replicated", f"{PEER} (middle half)",
              f"{PEER} : replicated"]  # fmt: skip
    many, rows = len(record.races) > 1, []
    for workload in record.modes:
        for race in record.races:
            plain = {e.group: e for e in race.entries if e.name.startswith("plain ")}
            (peer,) = [e for e in race.entries if e.role == "peer"]
            for entry in [e for e in race.entries if e.role == "ours" and e is not plain[e.group]]:
                slots = str(entry.facts.get(workload, "| |")).split("|")
                way = entry.name.removesuffix(entry.group).removeprefix("replicated ").strip()
                own = plain[entry.group]
                rows.append([
                    workload, entry.group, f"{way}, {race.malloc} malloc" if many else way,
                    *(part.strip() for part in slots), _timed(own, workload), _timed(entry, workload),
                    ratio(race.times(own, workload, entry)), _timed(peer, workload),
                    ratio(race.times(peer, workload, entry)),
                ])  # fmt: skip
    return header, rows


def _timed(entry: Entry, mode: str) -> str:
    return f"failed: {entry.failed}" if entry.failed is not None else timed_words(entry, mode)
