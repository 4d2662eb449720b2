"""`trimtab bench kernels`: the pieces of a layer. Grouped GEMMs against dense ones, moving rows against a copy, plans.

    experts forward    x [T, D] -> y [T, D] for a plan that is there        2 dense GEMMs of all rows at once
    experts backward   all gradients of it                                  4 dense GEMMs
    grouped_mm         gathered rows [R, D] x up [e, D, 2F] -> [R, 2F]      a dense GEMM
    grouped_wgrad      rows^T x pre-activation gradients -> [e, 2F, D]      a dense GEMM
    gather             x [T, D] -> [R, D]                                   copy of the bytes read and written
    combine            [R, D] -> weighted sums [T, D]                       copy of the bytes read and written
    plan               expert ids -> sorted rows; on one rank, and for 8    nothing: microseconds are the point

Casts that a kernel set needs for a dtype (bf16 without bf16 instructions) are part of its time. A set that does the
whole expert in one call has no grouped GEMM of its own to time.

Legend: T tokens, K experts per token, R = T * K expert rows, D model dim, F expert hidden dim, e experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestant import Contestant
from benchmarks.cost import combine_bytes, gather_bytes
from benchmarks.layer_case import DTYPES, LayerCase, LayerData, expert_weights
from benchmarks.limits import gemm, in_turn
from benchmarks.subject import Subject, Where
from benchmarks.task import Task
from trimtab.dispatch.plan import ExpertPlan, plan_experts, plan_ranks, sort_by_rank
from trimtab.experts.mlp import ExpertMath, ExpertWeights, expert_mlp
from trimtab.kernels.grouped import Kernels, get_kernels
from trimtab.kernels.loop import LoopKernels
from trimtab.kernels.rows import combine_rows

EXPERTS = ("experts forward", "experts backward")
MODES = (*EXPERTS, "grouped_mm", "grouped_wgrad", "gather", "combine", "plan of one rank", "plan of 8 ranks")


def kernels_task(
    shape: tuple[int, int, int, int],
    *,
    tokens: int,
    dtype: str,
    threads: int = 1,
    workload: str = "balanced",
    kernels: Sequence[str] = ("auto",),
) -> Task:
    """One contestant per kernel set, one for what they share, and the limits. One rank."""
    dim, hidden, num_experts, top_k = shape
    case = LayerCase(
        dim=dim, hidden=hidden, num_experts=num_experts, top_k=top_k, tokens=tokens, dtype=dtype, workload=workload
    )

    def made(name: str, role: Any, build: str, **args: Any) -> Contestant:
        return Contestant(name=name, role=role, build=build, args=case.as_args(**args), threads=threads)

    rows, size = tokens * top_k, case.torch_dtype.itemsize
    moved = {"gather": gather_bytes(rows, dim, size), "combine": combine_bytes(rows, tokens, dim, size)}
    dense = [
        made(f"dense {precision}", "limit", f"{__name__}:build_dense", dtype=precision)
        for precision in dict.fromkeys(("fp32", dtype))
    ]
    return Task(
        part="kernels",
        case={"shape": list(shape), "dtype": dtype, "tokens": tokens, "threads": threads, "workload": workload},
        contestants=[
            *(made(f"trimtab {name}", "ours", f"{__name__}:build_set", kernels=name) for name in kernels),
            made("trimtab rows and plans", "ours", f"{__name__}:build_shared"),
            *dense,
            made("copy", "limit", "benchmarks.limits:build_copies", modes=moved),
        ],
        modes=MODES,
    )


def build_set(args: dict[str, Any], where: Where) -> Subject:
    """args: the case and `kernels`."""
    case = LayerCase.of(args)
    kernels = get_kernels(args["kernels"], torch.device("cpu"))
    compute = kernels.compute_dtype(case.torch_dtype)
    data, (up, down) = LayerData.of(case, 0), expert_weights(case)
    plan = plan_experts(data.ids_TK, case.num_experts)
    weights = ExpertWeights(up=up.requires_grad_(), down=down.requires_grad_())
    wanted = (data.x_TD, data.w_TK, up, down)

    def forward() -> Tensor:
        return expert_mlp(data.x_TD, data.w_TK, plan, weights, ExpertMath(), kernels)

    y = forward()
    modes: dict[str, Callable[[], object]] = {
        "experts forward": forward,
        "experts backward": lambda: torch.autograd.grad(y, wanted, data.dy_TD, retain_graph=True),
    }
    if type(kernels).grouped_mm is not LoopKernels.grouped_mm or type(kernels) is LoopKernels:
        modes |= _pieces(kernels, plan, data.x_TD.detach(), up.detach(), compute)
    return Subject(modes=modes, facts={"kernels": kernels.name, "computes in": str(compute).removeprefix("torch.")})


def _pieces(
    kernels: Kernels, plan: ExpertPlan, x_TD: Tensor, up: Tensor, compute: torch.dtype
) -> dict[str, Callable[[], object]]:
    """The products with up alone, and the gather before them."""
    x_RD = x_TD.index_select(0, plan.row_R)
    pre_RI = torch.randn(x_RD.shape[0], up.shape[1]).to(up.dtype)
    dup, up_t = torch.empty_like(up), up.transpose(1, 2)

    def grouped_mm() -> None:
        for b in kernels.blocks(plan.offsets_e, x_RD.shape[0]):
            x, w = x_RD[b.rows].to(compute), up_t[b.experts].to(compute)
            if compute == up.dtype:
                kernels.grouped_mm(x, w, b, pre_RI[b.rows])
            else:
                pre_RI[b.rows] = kernels.grouped_mm(x, w, b)

    def grouped_wgrad() -> None:
        for b in kernels.blocks(plan.offsets_e, x_RD.shape[0]):
            x, dy = x_RD[b.rows].to(compute), pre_RI[b.rows].to(compute)
            kernels.grouped_wgrad(x, dy, b, dup[b.experts].transpose(1, 2))

    def gather() -> None:
        for b in kernels.blocks(plan.offsets_e, x_RD.shape[0]):
            kernels.gather(x_TD, plan.row_R[b.rows])

    return {"grouped_mm": grouped_mm, "grouped_wgrad": grouped_wgrad, "gather": gather}


def build_shared(args: dict[str, Any], where: Where) -> Subject:
    """args: the case. Sums of rows, and plans."""
    case, ranks = LayerCase.of(args), 8
    ids = LayerData.of(case, 0).ids_TK.int()
    plan = plan_experts(ids, case.num_experts)
    rows = torch.randn(plan.row_R.shape[0], case.dim).to(case.torch_dtype)
    weights = torch.rand(rows.shape[0]).to(case.torch_dtype)
    per_rank = -(-case.num_experts // ranks)

    def plan_for_ranks() -> None:
        sort = sort_by_rank(ids, per_rank, ranks)
        plan_ranks(sort, int(sort.rows_P.sum()), int(sort.slots_P.sum()))

    return Subject(
        modes={
            "combine": lambda: combine_rows(rows, plan.row_csr, weights),
            "plan of one rank": lambda: plan_experts(ids, case.num_experts),
            "plan of 8 ranks": plan_for_ranks,
        }
    )


def build_dense(args: dict[str, Any], where: Where) -> Subject:
    """args: the case and `dtype`. GEMMs of all rows at once."""
    case = LayerCase.of(args)
    widths = ((2 * case.hidden, case.dim), (case.dim, case.hidden))
    up, down = (gemm(case.tokens * case.top_k, n, k, DTYPES[args["dtype"]]) for n, k in widths)
    forward, backward = EXPERTS
    return Subject(
        modes={
            forward: in_turn([up[0], down[0]]),
            backward: in_turn([*up[1:], *down[1:]]),
            "grouped_mm": up[0],
            "grouped_wgrad": up[2],
        }
    )
