"""With combine="ordered" a token's output has the same bits for ep = 1, 2, 4, and whatever else is in the batch.

This is as far as the matrix products go: a row of x W must not depend on the rows beside it. With torch's products on
CPU (the router's, and kernels "torch") that holds from some 16 rows on; 1 to 15 rows may go another way, by width and
dtype, and the last bits differ. So:

    32 rows or more for the router and for each expert     the same bits, shown here
    fewer                                                  the same bits wherever the products alone give the same,
                                                           and equal up to rounding always, shown here too

Legend: T tokens, D model dim, E experts, R rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from helpers.comparing import relative_error
from helpers.ranks import run_ranks
from trimtab.experts.module import ExpertMLP
from trimtab.moe import MoE, MoEConfig
from trimtab.oracle import swiglu
from trimtab.parallel.expert_parallel import ExpertParallel
from trimtab.routing.config import RouterConfig

E, D, F, K, T, ENOUGH = 4, 64, 32, 3, 96, 32
KINDS = ((torch.float32, "torch"), (torch.float32, "auto"), (torch.bfloat16, "auto"))


def layer(dtype: torch.dtype, kernels: str, ep: int, transport: str) -> MoE:
    torch.manual_seed(2)
    config = MoEConfig(
        dim=D, hidden=F, router=RouterConfig(num_experts=E, top_k=K), combine="ordered", shared_hidden=16, dtype=dtype,
        kernels=kernels,
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (4 // ep, ep), mesh_dim_names=("edp", "ep"))
    style = ExpertParallel(transport=transport)  # type: ignore[arg-type]
    return style._apply(config.build("moe"), mesh["ep"])  # type: ignore[return-value]


def tokens(seed: int, number: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(number, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.no_grad()
def bits_on_rank() -> dict[str, list[int]]:
    """How many of this rank's first T tokens have other bits than with ep = 1 alone, and the fewest rows of a GEMM."""
    rank, found = dist.get_rank(), {}
    for dtype, kernels in KINDS:
        x, first = tokens(rank, T, dtype), None
        for ep, transport in ((1, "alltoall"), (2, "alltoall"), (4, "alltoall"), (4, "allgather")):
            moe = layer(dtype, kernels, ep, transport)
            for others in (0, 33, 5 + 20 * rank):  # behind the same tokens, then before them
                more = tokens(100 + others + rank, others, dtype)
                behind, before = moe(torch.cat((x, more))), moe(torch.cat((more, x)))
                first = behind.y[:T] if first is None else first
                changed = [int((y != first).any(1).sum()) for y in (behind.y[:T], before.y[others:])]
                found[f"{dtype} {kernels} ep {ep} {transport} others {others}"] = [*changed, int(behind.loads_E.min())]
    return found


@pytest.mark.xdist_group("ranks4")
def test_bits_do_not_depend_on_ep_nor_on_other_tokens() -> None:
    for found in run_ranks(bits_on_rank, 4, deadline=120.0):
        assert len(found) == 3 * 4 * 3
        for name, (behind, before, rows) in found.items():
            assert rows >= ENOUGH, f"{name}: an expert has {rows} rows of this rank, choose other tokens"
            assert (behind, before) == (0, 0), name


@pytest.mark.parametrize(("dim", "hidden"), [(64, 32), (512, 256)])
@torch.no_grad()
def test_where_rows_are_few_the_products_alone_decide(dim: int, hidden: int) -> None:
    """One expert, 1 to 31 of 64 rows: other bits only where x W has other bits."""
    torch.manual_seed(2)
    experts = ExpertMLP(1, dim, hidden, kernels="torch")
    x, ids, w = torch.randn(64, dim), torch.zeros(64, 1, dtype=torch.int32), torch.ones(64, 1)
    up, down = experts.gate_up[0].flatten(0, 1).T, experts.down[0].T
    whole, pre = experts(x, ids, w), x @ up
    h = swiglu(pre)
    for rows in range(1, ENOUGH):
        few = experts(x[:rows], ids[:rows], w[:rows])
        assert relative_error(few, whole[:rows]) <= 2e-6
        same = torch.equal(x[:rows] @ up, pre[:rows]) and torch.equal(h[:rows] @ down, (h @ down)[:rows])
        assert torch.equal(few, whole[:rows]) or not same, rows
