"""What the Triton kernels must do, as functions of the device: test_gpu_triton.py calls them on CUDA, and
gpu_evidence/interpreted_experts.py in Triton's interpreter, so that they are known to run.

Legend: M rows, K slots per row, E experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.comparing import assert_close, gradients
from trimtab import oracle
from trimtab.experts.module import ExpertMLP
from trimtab.experts.plan import plan_experts
from trimtab.experts.weight_grad import MainGradMode
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.triton.moves import place_slots

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 5e-3}
TRITON = KernelChoice("triton")
"""One for all cases: tested once on a device."""
FALLS = ("random", "one_expert", "cold", "dropped", "all_dropped")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: how its slots fall, and its sizes. autocast: to which dtype, if it runs under it."""

    fall: str = "random"
    rows: int = 200
    top_k: int = 2
    experts: int = 6
    dim: int = 256
    hidden: int = 128
    dtype: torch.dtype = torch.bfloat16
    main_grad: MainGradMode = "off"
    kernels: KernelChoice = TRITON
    autocast: torch.dtype | None = None


def ids_of(case: Case, seed: int = 0) -> Tensor:
    """[M, K] on the host."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(case.rows, case.experts, generator=g).argsort(1)[:, : case.top_k]
    if case.fall == "one_expert":
        ids = torch.full_like(ids, case.experts - 2)
    if case.fall == "cold":
        ids = ids % (case.experts - 2) + 1
    if case.fall == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.5, -1)
    if case.fall == "all_dropped":
        ids = torch.full_like(ids, -1)
    return ids.contiguous()


def module_of(case: Case, device: str) -> ExpertMLP:
    torch.manual_seed(0)
    made = ExpertMLP(
        case.experts, case.dim, case.hidden, dtype=case.dtype, main_grad=case.main_grad, kernels=case.kernels
    )
    return made.to(device)


def inputs_of(case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, ids, weights, dy) on the device. Rows that nobody chose hold NaN."""
    g, ids = torch.Generator().manual_seed(seed + 1), ids_of(case, seed)
    x, dy = (torch.randn(case.rows, case.dim, generator=g) for _ in range(2))
    x[(ids < 0).all(1)] = torch.nan
    x, dy = x.to(device, case.dtype), dy.to(device, case.dtype)
    w = torch.rand(case.rows, case.top_k, generator=g).to(device)
    return x.requires_grad_(), ids.to(device), w.requires_grad_(), dy


def plan_is_true(case: Case, device: str, alignment: int) -> None:
    """The plan of three launches against that of two sorts, in every integer."""
    ids = ids_of(case)
    wanted = plan_experts(ids, case.experts, alignment=alignment, static=True)
    got = place_slots(ids.to(device), case.experts, alignment=alignment)
    kept = int(wanted.row_csr.indptr[-1])
    for field in ("slot_R", "row_R", "counts_e", "offsets_e"):
        assert torch.equal(getattr(got, field).cpu(), getattr(wanted, field)), (case, field)
    assert torch.equal(got.row_csr.indptr.cpu(), wanted.row_csr.indptr), case
    assert torch.equal(got.row_csr.indices[:kept].cpu(), wanted.row_csr.indices[:kept]), case


def experts_are_true(case: Case, device: str) -> None:
    """Output and every gradient of an ExpertMLP on these kernels against the oracle."""
    module, (x, ids, w, dy) = module_of(case, device), inputs_of(case, device)
    for param in module.parameters():
        param.main_grad = torch.full_like(param, 3.0, dtype=torch.float32, requires_grad=False)
    with torch.autocast(torch.device(device).type, case.autocast, enabled=case.autocast is not None):
        y = module(x, ids, w)
    made = y.grad_fn if case.autocast is None else y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert type(made).__name__ in ("_ExpertsBackward", "_ExpertsWithStateBackward")
    y.backward(dy)
    up, down, true_x, true_w = (t.detach().cpu().double().requires_grad_() for t in (module.gate_up, module.down, x, w))
    leaves = [true_x, true_w, up, down]
    true = oracle.moe(true_x, ids.cpu(), true_w, up, down)
    grads = gradients(true, leaves, dy.cpu())
    stale = 3.0 if case.main_grad == "accumulate" else 0.0
    weights = [p.grad if case.main_grad == "off" else p.main_grad for p in (module.gate_up, module.down)]
    wanted = (true, *grads[:2], *(g + stale for g in grads[2:]))
    for name, got, truth in zip(("y", "dx", "dw", "dup", "ddown"), (y, x.grad, w.grad, *weights), wanted, strict=True):
        bound = BOUNDS[case.autocast or case.dtype]
        if name == "dw" and case.rows == 1 and case.dtype == torch.float32:
            bound *= cancelled(true_x, ids.cpu(), dy.cpu(), up, down, truth)
        assert_close(got.cpu(), truth, bound, f"{case}: {name}")


@torch.no_grad()
def cancelled(x: Tensor, ids: Tensor, dy: Tensor, up: Tensor, down: Tensor, dw: Tensor) -> float:
    """How much smaller the largest routing weight gradient of one row is than such a sum of its terms h * dh would be
    on average, had they random signs: terms are rounded for what they are, not for what is left of them. 1 or more.
    """
    terms = [(oracle.swiglu(up[e].flatten(0, 1) @ x[0]) * (dy[0].double() @ down[e])).norm() for e in ids[0] if e >= 0]
    return max(1.0, float(max(terms)) / float(dw.abs().max())) if terms else 1.0
