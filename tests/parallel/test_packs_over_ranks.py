"""Packs that lie across ranks and do not fit are refused, on every rank. What they compute are rows of the ledger."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.layout_case import mesh
from helpers.ranks import run_ranks
from trimtab.errors import DesyncError, InputError
from trimtab.moe import MoEConfig, MoEOutput
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.routing.config import RouterConfig


def spread() -> Any:
    router = RouterConfig(num_experts=4, top_k=2, sequence_aux_loss=0.7)
    moe = MoEConfig(dim=8, hidden=8, router=router, dtype=torch.float64).build()
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
