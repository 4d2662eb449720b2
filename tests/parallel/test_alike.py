"""Ranks that share tokens or sequences and are given other numbers of them: every rank says so, before rows move."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from helpers.ranks import run_ranks
from trimtab import DesyncError, ExpertParallel, MoEConfig, RouterConfig, parallelize

REPLICATED, SHARDED, CONTEXT = "replicated", "sharded", "context parallel"
WRONG = (
    (REPLICATED, (2, 4), (1, 8), "tp_mesh that must hold the same tokens", "2 sequence(s) of 4", "1 sequence(s) of 8"),
    (REPLICATED, (1, 5), (1, 6), "tp_mesh", "1 sequence(s) of 5", "1 sequence(s) of 6"),  # whose shares are as long
    (REPLICATED, (1, 0), (1, 4), "tp_mesh", "1 sequence(s) of 0", "1 sequence(s) of 4"),
    (SHARDED, (2, 4), (1, 8), "tp_mesh that must share sequences", "2 sequence(s)", "1 sequence(s)"),
    (CONTEXT, (0, 4), (1, 4), "cp_mesh that must share sequences", "0 sequence(s)", "1 sequence(s)"),
)


def layer(kind: str, dense: DeviceMesh, sequence_aux: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    router = RouterConfig(num_experts=4, top_k=2, sequence_aux_loss=sequence_aux)
    model = nn.ModuleDict({"moe": MoEConfig(dim=8, hidden=8, router=router).build()})
    tokens = "own" if kind == CONTEXT else kind
    meshes = {"cp_mesh" if kind == CONTEXT else "tp_mesh": dense["inner"]}
    parallelize(model, init_device_mesh("cpu", (4,)), {"moe": ExpertParallel(tokens=tokens, **meshes)})  # type: ignore[arg-type]
    return model["moe"]


def on_rank() -> list[str]:
    """On four ranks of one expert group, of which two share tokens: the other two have others of theirs."""
    mesh, rank, said = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "inner")), dist.get_rank(), []
    for kind, *shapes, _, _, _ in WRONG:
        moe = layer(kind, mesh)
        shapes = [*shapes, (1, 3), (1, 3)]
        try:
            moe(torch.randn(*shapes[rank], 8))
        except DesyncError as error:
            said.append(str(error))
        moe(torch.randn(2, 4, 8)).y.sum().backward()  # the ranks are still together
    for kind in (SHARDED, CONTEXT):
        layer(kind, mesh)(torch.randn(2, 3 + rank, 8))
        layer(kind, mesh, sequence_aux=0.0)(torch.randn(4 - rank, 4 + 4 * rank, 8))  # no sums over sequences
    return said


@pytest.mark.xdist_group("ranks4")
def test_other_numbers_of_them_are_refused_on_every_rank() -> None:
    for said in run_ranks(on_rank, 4):
        for (*_, rule, first, second), words in zip(WRONG, said, strict=True):
            assert words.startswith("[layer moe, ranks 0, 1, phase count]")
            assert f"ranks of one {rule}" in words
            assert f"(rank(s) 0: {first}" in words
            assert f"; rank(s) 1: {second}" in words
