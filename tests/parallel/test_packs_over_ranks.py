"""A pack over ranks has the losses, loads and gradients of its documents one by one in one process: packs of each
rank's own, some of them empty, and packs whose documents lie across ranks of tensor and context parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.layout_case import mesh
from helpers.pack_ranks import PACKS, Cut, build, run_cuts
from helpers.ranks import run_ranks
from trimtab.errors import DesyncError, InputError
from trimtab.moe import MoEOutput
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize

S, R = {"tokens": "sharded"}, {"tokens": "replicated"}
PLANS: dict[str, tuple[int, list[Cut]]] = {
    "packs of their own": (2, [
        *(Cut(ep=2, packs=packs, counted=counted) for packs in PACKS for counted in (False, True)),
        Cut(ep=2, packs="ragged", masked=1.0), Cut(packs="empty"), Cut(ep=2, rerun=True),
    ]),
    "context parallel": (2, [
        *(Cut(ep=2, cp=2, order=order, packs=p) for order in ("zigzag", "uneven", "last") for p in PACKS),
        Cut(cp=2), Cut(ep=2, cp=2, masked=1.0), Cut(ep=2, cp=2, order="uneven", rerun=True),
    ]),
    "tensor parallel": (2, [
        *(Cut(ep=2, tp=2, packs=packs, **tokens) for tokens in (S, R) for packs in PACKS),
        Cut(tp=2, **S), Cut(tp=2, masked=0.0, **R), Cut(ep=2, tp=2, rerun=True, **S),
    ]),
    "both, and data parallel": (4, [
        Cut(ep=4, cp=2, tp=2, **S), Cut(ep=2, cp=2, tp=2, order="last", packs="ragged", **S), Cut(ep=2, cp=2),
        Cut(ep=4, cp=2, tp=2, order="uneven", **R), Cut(ep=4, tp=2, packs="empty", **R), Cut(ep=4, cp=4, order="last"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_a_pack_is_its_documents_one_by_one(plan: str) -> None:
    ranks, cuts = PLANS[plan]
    for rank, found in enumerate(run_ranks(run_cuts, ranks, cuts)):
        for cut, errors in found.items():
            assert len(errors) == 11
            bad = {name: error for name, error in errors.items() if not error <= 1e-12}
            assert not bad, (rank, cut, bad)


def spread() -> Any:
    moe = build()
    whole = mesh(data=1, cp=2)
    parallelize(moe, mesh(ep=2)["ep"], {"": ExpertParallel(cp_mesh=whole["cp"])})
    return moe


def refused(rank_of_the_other: int) -> list[str]:
    """What each rank is told of a call without a number, of one with another number, and of an id that is outside."""
    rank, said = torch.distributed.get_rank(), []
    x, ids = torch.randn(2, 3, 8, dtype=torch.float64), torch.tensor([[0, 0, 1], [0, 1, 1]])
    other = rank == rank_of_the_other
    calls: list[tuple[type[Exception], dict[str, Any]]] = [
        (InputError, {"sequence_ids": ids}),
        (DesyncError, {"sequence_ids": ids, "num_sequences": 3 if other else 2}),
        (DesyncError, {} if other else {"sequence_ids": ids, "num_sequences": 1}),
        (InputError, {"sequence_ids": ids - other.__int__(), "num_sequences": 2}),
    ]
    for error, given in calls:
        moe = spread()
        with pytest.raises(error) as caught:
            moe(x, **given)
        said.append(str(caught.value))
    padded: MoEOutput = spread()(x, token_mask=ids >= 1, sequence_ids=ids - 1, num_sequences=1)
    assert torch.isfinite(padded.y).all()
    return said


@pytest.mark.parametrize("other", [0, 1])
def test_what_does_not_fit_is_refused_on_every_rank(other: int) -> None:
    for said in run_ranks(refused, 2, other):
        assert "needs num_sequences" in said[0]
        assert "2 pack(s) with num_sequences=2" in said[1]
        assert "2 pack(s) with num_sequences=3" in said[1]
        assert "2 sequence(s)" in said[2]
        assert f"rank {other}: 6 slot(s)" in said[3]
        assert "sequence ids, which num_sequences bounds" in said[3]
