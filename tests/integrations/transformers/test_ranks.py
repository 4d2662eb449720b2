"""A model that `from_pretrained` lays onto ranks trains like one process over every rank's own data.

Outputs, loss and every parameter's gradient, on real ranks over Gloo, against transformers' own loop over the experts
in one process. Float64 is the judge, since there every difference is a mistake; float32 shows what users get.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.families import REFUSED_WHEN_SHARDED, ep_capable, experts_modules, family_names, forward
from helpers.model_case import PATTERNS, Case, Mesh, batches
from helpers.model_ranks import REPLICATED, begin, both_precisions, load, run_cases, verify
from helpers.ranks import run_ranks
from trimtab.errors import TrimtabError

pytestmark = pytest.mark.usefixtures("registered", "one_thread")

TWO, FOUR = Mesh(ep=2, fsdp=2), Mesh(ep=4, fsdp=4)
SHARDED = Mesh(ep=2, fsdp=4)
"""FSDP shards each expert."""
SAME = Mesh(ep=2, tp=2)
"""Ranks with the same tokens."""
CUT = Mesh(tp=2)
"""transformers' rules cut experts over F, of gate and up each (qwen3), transposed (aria), without a gate."""
PRESETS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")
NO_TENSOR_PARALLEL = {"muse_spark"}
"""Their tensor-parallel plans fail in transformers with any experts."""
LAYOUTS = ("gpt_oss", "muse_spark", "nemotron_h", "aria", "openai_privacy_filter")
"""Transposed with biases and interleaved, a norm behind the experts, no gate, transposed, a gate of its own."""
ADAPTED = ("qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark", "aria", "granitemoe", "ernie4_5_vl_moe")

COLD: dict[str, Any] = {"patterns": ("uneven", "cold")}
LORA: dict[str, Any] = COLD | {"lora": "experts"}
ATTENTION: dict[str, Any] = COLD | {"lora": "attention"}
"""Attention's adapters are peft's, and `average_replicated` takes the mean that FSDP takes of what it shards."""
TOLD: dict[str, Any] = {"patterns": ("told",), "steps": 2}
RECOMPUTES = ("", "reentrant", "not reentrant")


def of(family: str, mesh: Mesh = TWO, **options: Any) -> Case:
    """In float64, where nothing else is asked."""
    return Case(family=family, mesh=mesh, **({"dtype": torch.float64} | options))


def named(name: str, case: Case) -> Case:
    return replace(case, experts=name, exchange=name)


def with_replicas(cases: Sequence[Case]) -> list[Case]:
    """The cases, and all of them with replicas of hot experts on ranks that have room."""
    return [*cases, *(named(REPLICATED, case) for case in cases)]


def rows() -> Iterator[tuple[str, list[Case]]]:
    """Cases of one number of ranks each, by what they show."""
    families = [name for name in family_names() if ep_capable(name)]
    for group in range(4):
        plain = [Case(family=name, mesh=TWO, patterns=("natural",)) for name in families[group::4]]
        yield f"every family, {group}", [c for case in plain for c in both_precisions(case)]
    for mesh in (FOUR, SHARDED, Mesh(ep=4, fsdp=2, tp=2), Mesh(ep=2, fsdp=2, replicate=2)):
        names = [n for n in (*PRESETS, *LAYOUTS[1:4]) if mesh.tp == 1 or n not in NO_TENSOR_PARALLEL]
        cases = [of(name, mesh, patterns=PATTERNS if mesh == FOUR else (*COLD["patterns"], "hot")) for name in names]
        if mesh == FOUR:
            cases += [of(name, mesh, dtype=torch.float32, patterns=("natural", "hot")) for name in PRESETS]
        unequal = [of(name, mesh, patterns=("cold", "hot")) for name in ("qwen3_moe", "gpt_oss")]
        yield f"however tokens fall, {mesh}", [*cases, *(named(REPLICATED, case) for case in unequal)]
    for exchange, experts in (("trimtab", "grouped_mm"), ("trimtab", "eager"), ("all_to_all", "trimtab")):
        half: dict[str, Any] = {"exchange": exchange, "experts": experts}
        if experts == "grouped_mm":
            half["dtype"] = torch.float32  # it has no float64
        cold_first = ("cold", "natural", "uneven", "hot")  # nothing is set up by an earlier pass where rows came
        names = ["qwen3_moe", *(name for name in LAYOUTS if name != "aria")]
        yield f"{exchange} and {experts}", [of(name, **half, patterns=cold_first) for name in names]
    # Ranks with the same experts reduce their gradients together: the cold one must bring its zeros.
    yield "a loop on a cold rank", [of("qwen3_moe", SHARDED, experts="eager", patterns=("cold",))]
    for mesh in (TWO, FOUR):
        yield f"ordered sums, {mesh}", both_precisions(named("trimtab_ordered", Case(family="qwen3_moe", mesh=mesh)))
    shared = named("trimtab_shared", of("qwen3_moe"))
    layouts = [named(REPLICATED, replace(shared, family=name)) for name in LAYOUTS]
    yield "shared memory and replicas of every layout", [shared, *layouts]
    yield (
        "under autocast",
        [
            of("qwen3_moe", dtype=torch.float32, autocast=True, experts=experts, patterns=("own", "cold"))
            for experts in ("trimtab", "grouped_mm")
        ],
    )
    for family, router in (("qwen3_moe", "gate.weight"), ("gpt_oss", "router")):
        ways: list[dict[str, Any]] = [{"steps": 2}, {"steps": 2, "unsynced": True}]
        ways += [{"frozen": router}, {"frozen": "experts"}, {"recompute": "reentrant"}, {"recompute": "not reentrant"}]
        ways += [{"recompute": "not reentrant", "steps": 2}]
        trained = with_replicas([of(family, **COLD, **way) for way in ways])
        yield f"ways to train {family}", [*trained, of(family, **COLD, frozen="embed_tokens")]
    adapted = [of(name, lora="experts", patterns=("natural", "cold")) for name in ADAPTED]
    adapted += [named(REPLICATED, replace(case, patterns=("cold",))) for case in adapted]
    adapted += [of(name, dtype=torch.float32, **LORA) for name in ADAPTED[:2]]
    ways = [{"steps": 2}, {"recompute": "reentrant"}, {"recompute": "not reentrant", "steps": 2}]
    attention = [of("qwen3_moe", **ATTENTION, **way) for way in ways]
    attention += [named(REPLICATED, case) for case in (of("qwen3_moe", **ATTENTION), attention[2])]
    natural: dict[str, Any] = {"patterns": ("natural",)}
    cut = [of("qwen3_moe", CUT, **ATTENTION | natural), *(of(n, CUT, **LORA | natural) for n in ("aria", "nemotron_h"))]
    same = [of("qwen3_moe", SAME, **ATTENTION), of("gpt_oss", SAME, **LORA)]
    yield "adapters", [*adapted, *attention, *same, *cut]
    four = [of("qwen3_moe", SHARDED, **ATTENTION), of("qwen3_moe", Mesh(ep=4, fsdp=2, tp=2), **LORA)]
    hybrid = [of("qwen3_moe", mesh, **LORA) for mesh in (Mesh(ep=2, fsdp=2, replicate=2), Mesh(fsdp=2, tp=2))]
    yield "adapters on four", [*with_replicas(four), *hybrid]
    codes: dict[str, Any] = LORA | {"codes": "int8", "dtype": torch.float32}
    encoded = with_replicas([of(name, **codes) for name in ("qwen3_moe", "gpt_oss")])
    encoded += [of(name, **codes) for name in ("nemotron_h", "ernie4_5_vl_moe")]
    yield "adapters on codes", [*encoded, of("qwen3_moe", SAME, **codes)]
    yield "adapters on codes on four", with_replicas([of("qwen3_moe", SHARDED, **codes | {"lora": "attention"})])
    told = [of("qwen3_moe", **TOLD, recompute=way) for way in RECOMPUTES]
    told += [of(name, **TOLD, recompute=way) for name in ("deepseek_v3", "gpt_oss") for way in RECOMPUTES[::2]]
    yield "replayed decisions", told
    yield "replayed decisions on four", [replace(case, mesh=SHARDED) for case in told[:3]]
    for mesh in (Mesh(fsdp=2), TWO, SHARDED):
        signs = [of("qwen3_moe", mesh, balance="sign", steps=2, recompute=way) for way in RECOMPUTES]
        kinds = [replace(signs[1], family="deepseek_v3", balance="own")]
        kinds += [replace(signs[1], family="gpt_oss", balance="quantile"), replace(signs[0], first_pass=True)]
        yield f"balanced, {mesh}", [*signs, *kinds]
    under = [of("qwen3_moe", Mesh(fsdp=4), balance=kind, steps=2, ddp=True) for kind in ("sign", "quantile")]
    yield "balanced, under DDP", [replace(case, first_pass=True, recompute=RECOMPUTES[2]) for case in under]


ROWS = dict(rows())
ranks4 = pytest.mark.xdist_group("ranks4")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=ranks4 if cases[0].mesh.ranks == 4 else ()) for name, cases in ROWS.items()]
)
def test_ranks_train_like_one_process(name: str, tmp_path: Path) -> None:
    verify(ROWS[name], tmp_path)


@ranks4
def test_ordered_bits_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """With enough rows for every expert: a GEMM's own bits depend on their number where it is small (gemv for one)."""
    outputs = []
    for ranks in (1, 2, 4):
        case = Case(family="qwen3_moe", mesh=Mesh(ep=ranks, fsdp=ranks), patterns=("crowded",))
        first = run_ranks(run_cases, ranks, [named("trimtab_ordered", case)], str(tmp_path), deadline=60.0)[0][0]
        outputs.append(first["crowded"].values["output"])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def run_shared(case: Case, folder: str) -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    begin()
    kind: Any = EPImplementationInterface()["trimtab"]
    models = [load(case, folder) for _ in range(2)]
    built = [thing for thing in gc.get_objects() if type(thing) is kind]
    transports = [weakref.ref(ep.dispatcher.transport) for ep in built]
    assert len(built) == sum(len(experts_modules(model)) for model in models) > 2
    assert len({transport() for transport in transports}) == len(models)
    for model in models:  # the names still tell the layers apart
        forward(model, batches(case, model, "natural", dist.get_rank())[0])
    assert len({ep.dispatcher.layer for ep in built}) == len(built)
    dist.barrier()
    del models, model, built
    gc.collect()
    assert {transport() for transport in transports} == {None}


def test_a_model_has_one_transport_and_none_outlives_its_model(tmp_path: Path) -> None:
    run_ranks(run_shared, 2, Case(family="qwen3_moe", mesh=TWO), str(tmp_path), deadline=120.0)


SLOT, STOCK = "rank 1: 1 slot", "'eager' runs no replicas: with replicate_experts= choose"
FAULTS = {
    "id too large": ("InputError", SLOT), "id negative": ("InputError", SLOT),
    "weight not a number": ("InputError", SLOT), "another top-k": ("DesyncError", "top-1, "),
    "all eager": ("ConfigError", STOCK), "one eager": ("DesyncError", "hold other experts"),
}  # fmt: skip
"""Where replicas are made; else any experts will do behind the exchange."""


def run_broken(cases: Sequence[Case], folder: str) -> list[tuple[str, str]]:
    """What each case and fault raised. The last rank hands its experts something else than its peers do, or has them
    run by another implementation."""
    begin()
    guilty = dist.get_rank() == dist.get_world_size() - 1
    found = []
    for case in cases:
        model = load(case, folder)
        module = next(iter(experts_modules(model).values()))
        for fault in FAULTS:

            def spoil(_: nn.Module, args: tuple[Any, ...], fault: str = fault) -> tuple[Any, ...]:
                hidden, ids, weights = (a.clone() for a in args)
                if fault.startswith("id"):
                    ids[-1, -1] = 10_000 if fault == "id too large" else -2
                elif fault == "weight not a number":
                    weights[0, 0] = torch.nan
                elif fault == "another top-k":
                    ids, weights = ids[:, :1], weights[:, :1]
                return hidden, ids, weights

            hook = module.register_forward_pre_hook(spoil) if guilty else None
            begun, raised = time.monotonic(), ("", "")
            if fault == "all eager" or (fault == "one eager" and guilty):
                module.config._experts_implementation = "eager"  # the model's setter passes over classes of FSDP
            try:
                forward(model, batches(case, model, "natural", dist.get_rank())[0])
            except TrimtabError as error:
                raised = type(error).__name__, str(error)
            assert time.monotonic() - begun < 10.0, fault
            module.config._experts_implementation = case.experts
            found.append(raised)
            if hook is not None:
                hook.remove()
    return found


def test_what_one_rank_does_wrong_every_rank_refuses(tmp_path: Path) -> None:
    cases = with_replicas([Case(family="qwen3_moe", mesh=TWO)])
    plain = FAULTS | {"all eager": ("", ""), "one eager": ("", "")}
    expected = [*plain.values(), *FAULTS.values()]
    for refusals in run_ranks(run_broken, 2, cases, str(tmp_path), deadline=60.0):
        for (kind, says), (raised, message) in zip(expected, refusals, strict=True):
            assert (raised, says in message) == (kind, True), message


def test_adapters_on_the_exchange_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"adapters of 8 experts, 32 to 32: of sharded experts those run"):
        verify([of("qwen3_moe", **LORA, exchange="all_to_all")], tmp_path)


def run_loading(cases: Sequence[Case], folder: str) -> list[str]:
    """What `from_pretrained` raises; nothing is empty."""
    begin()
    raised = []
    for case in cases:
        try:
            load(case, folder)
        except RuntimeError as error:
            raised.append(str(error))
        else:
            raised.append("")
    return raised


def test_what_transformers_cannot_load_onto_several_ranks_is_not_left_out_for_longer(tmp_path: Path) -> None:
    names = sorted(REFUSED_WHEN_SHARDED & set(family_names()))
    cases = [Case(family=name, mesh=TWO, experts="eager", exchange="all_to_all") for name in names]
    for name, *raised in zip(names, *run_ranks(run_loading, 2, cases, str(tmp_path), deadline=120.0), strict=True):
        assert any("automatic conversion of the weights" in words for words in raised), f"{name} loads: {raised}"
