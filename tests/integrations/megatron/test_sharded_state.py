"""Experts in Megatron's distributed checkpoints: one kind saves, others load at another parallelism, bit for bit, the
optimizer's state included: a step more gives the same parameters.

Legend: e local experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.megatron_cpu import megatron
from helpers.megatron_experts import KINDS, assembled, beside_megatron, model_of, model_parallel_at, step, trained
from helpers.ranks import run_ranks

FULLY, BY_BUCKETS = "fully_reshardable", "dp_reshardable"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who saves where, and who loads where. sharding: of the distributed optimizer, or "" for the ordinary one, or None
    without one. model: options of `model_of`. singleton: each expert under keys of its own."""

    saver: str = "Experts"
    place: str = "EP2"
    loaders: Sequence[str] = KINDS
    places: Sequence[str] = ("EP4", "EP2xETP2")
    sharding: str | None = FULLY
    model: dict[str, Any] = field(default_factory=dict)
    singleton: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        found = {"chained_optim_avoid_prefix": True, "singleton_local_shards": self.singleton}
        return found | ({"distrib_optim_sharding_type": self.sharding} if self.sharding else {})


def sharded(case: Case, wrapped: Any, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    state = {"model": wrapped.module.sharded_state_dict(metadata=case.metadata)}
    if case.sharding is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=case.metadata)
    return state


def differing(case: Case, folder: str) -> list[str]:
    """What is not as it was saved, or is not as with the saver behind one step more. Collective."""
    checkpoints, distributed, wrong = megatron.core.dist_checkpointing, bool(case.sharding), []
    Path(folder).mkdir(exist_ok=True)
    with model_parallel_at(case.place):
        model = model_of(case.saver, case.place, **case.model)
        wrapped, optimizer = trained(model, case.place, distributed, [1, 2])
        checkpoints.save(sharded(case, wrapped, optimizer, loading=False), folder)
        saved = assembled(model, case.place)
        step(wrapped, optimizer, case.place, 3)
        behind = assembled(model, case.place)
    for place in case.places:
        with model_parallel_at(place):
            for loader in case.loaders:
                model = model_of(loader, place, **case.model)
                with torch.no_grad():
                    for param in model.parameters():
                        param.fill_(torch.nan)
                wrapped, optimizer = trained(model, place, distributed, [9])
                loaded = checkpoints.load(sharded(case, wrapped, optimizer, loading=True), folder)
                model.load_state_dict(loaded["model"])
                for name, found in assembled(model, place).items():
                    wrong += [] if torch.equal(found, saved[name]) else [f"{loader} at {place}: {name}"]
                if case.sharding is not None:
                    with torch.no_grad():  # which Megatron leaves out for float32 by buckets
                        optimizer.load_state_dict(loaded["optimizer"])
                    step(wrapped, optimizer, place, 3)
                    for name, found in assembled(model, place).items():
                        wrong += [] if torch.equal(found, behind[name]) else [f"{loader} at {place}: state of {name}"]
    return wrong


def all_differing(cases: Sequence[Case], folder: str) -> list[list[str]]:
    with beside_megatron():
        return [differing(case, f"{folder}/{number}") for number, case in enumerate(cases)]


def check(folder: Path, *cases: Case) -> None:
    for found in run_ranks(all_differing, 4, cases, str(folder), deadline=60.0 + 60.0 * len(cases)):
        assert not any(found), dict(zip(cases, found, strict=True))


def test_ours_loads_what_megatron_saves_and_the_other_way_round(tmp_path: Path) -> None:
    ours, theirs = ("Experts",), ("SequentialMLP",)
    check(
        tmp_path,
        Case(saver="SequentialMLP", loaders=ours, places=("EP4",)),
        Case(saver="Experts", loaders=theirs, places=("EP2xETP2",), sharding=""),
    )


@pytest.mark.megatron_full
@pytest.mark.parametrize("sharding", [FULLY, ""])
@pytest.mark.parametrize("saver", KINDS)
def test_any_kind_loads_any_other(saver: str, sharding: str, tmp_path: Path) -> None:
    check(
        tmp_path,
        Case(saver=saver, sharding=sharding),
        Case(saver=saver, sharding=sharding, place="EP2xETP2", places=("EP2", "EP4")),
    )


@pytest.mark.megatron_full
@pytest.mark.parametrize("saver", KINDS)
def test_without_an_optimizer_any_parallelism_loads_any_other(saver: str, tmp_path: Path) -> None:
    check(
        tmp_path,
        Case(saver=saver, sharding=None, place="EP1", places=("EP4", "ETP4")),
        Case(saver=saver, sharding=None, place="EP2xETP2", places=("EP1", "EP4")),
    )


UNGATED, BIASED, BF16 = {"gated": False}, {"bias": True}, {"bf16": True}
FORMS = {
    "biases": Case(saver="SequentialMLP", model=BIASED, places=("EP4",)),
    "no gate, biases": Case(saver="Experts", model=UNGATED | BIASED, places=("EP4",)),
    "no gate": Case(saver="Experts", model=UNGATED, places=("EP2xETP2",), sharding=""),
    # with float32 main parameters
    "bfloat16": Case(saver="SequentialMLP", model=BF16, places=("EP4",)),
    "bfloat16 of ours": Case(saver="Experts", model=BF16, places=("EP2xETP2",), sharding=""),
    "an expert's own keys": Case(saver="SequentialMLP", singleton=True, places=("EP4", "EP2"), sharding=None),
    "an expert's own keys, of ours": Case(saver="Experts", singleton=True, places=("EP4", "EP2"), sharding=None),
    "frozen": Case(saver="Experts", model={"frozen": True}, places=("EP4",), sharding=""),
} | {
    f"by the buckets of DDP, {kind}": Case(saver=kind, loaders=(kind,), places=("EP2",), sharding=BY_BUCKETS)
    for kind in KINDS
}  # fmt: skip


@pytest.mark.megatron_full
@pytest.mark.parametrize("form", FORMS)
def test_of_every_form(form: str, tmp_path: Path) -> None:
    check(tmp_path, FORMS[form])
