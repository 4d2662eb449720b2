"""Ranks that share tokens or sequences and are given other numbers of them: every rank says so, before rows move."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimtab import DesyncError, ExpertParallel, MoEConfig, RouterConfig, parallelize
from trimtab.verify.ranks import run_ranks

REPLICATED, SHARDED, CONTEXT = "replicated", "sharded", "context parallel"
RULES = {REPLICATED: "all ranks of tp_mesh must hold the same tokens", SHARDED: "ranks that hold parts of the same"}
WRONG = (
    (REPLICATED, (2, 4), (1, 8), "1 to 2 sequences, {} here; 4 to 8 positions, {} here"),
    (REPLICATED, (1, 5), (1, 6), "5 to 6 positions, {1} here"),  # whose shares are as long
    (REPLICATED, (1, 0), (1, 4), "0 to 4 positions, {1} here"),
    (SHARDED, (2, 4), (1, 8), "1 to 2 sequences, {} here"),
    (CONTEXT, (0, 4), (1, 4), "0 to 1 sequences, {} here"),
)


def layer(kind: str, mesh: DeviceMesh, sequence_aux: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    router = RouterConfig(num_experts=4, top_k=2, sequence_aux_loss=sequence_aux)
    model = nn.ModuleDict({"moe": MoEConfig(dim=8, hidden=8, router=router).build()})
    tokens = "own" if kind == CONTEXT else kind
    meshes = {"cp_mesh" if kind == CONTEXT else "tp_mesh": mesh}
    parallelize(model, mesh, {"moe": ExpertParallel(tokens=tokens, **meshes)})  # type: ignore[arg-type]
    return model["moe"]


def on_rank() -> list[str]:
    mesh, rank, said = init_device_mesh("cpu", (2,)), dist.get_rank(), []
    for kind, *shapes, _ in WRONG:
        moe = layer(kind, mesh)
        try:
            moe(torch.randn(*shapes[rank], 8))
        except DesyncError as error:
            said.append(str(error))
        moe(torch.randn(2, 4, 8)).y.sum().backward()  # the ranks are still together
    for kind in (SHARDED, CONTEXT):
        layer(kind, mesh)(torch.randn(2, 3 + rank, 8))
        layer(kind, mesh, sequence_aux=0.0)(torch.randn(2 - rank, 4 + 4 * rank, 8))  # no sums over sequences
    return said


def test_other_numbers_of_them_are_refused_on_every_rank() -> None:
    for rank, said in enumerate(run_ranks(on_rank, 2)):
        for (kind, *shapes, numbers), words in zip(WRONG, said, strict=True):
            assert words.startswith(f"[layer moe, phase route] {RULES.get(kind, RULES[SHARDED])}")
            assert words.endswith(f"They have {numbers.format(*shapes[rank])}")
