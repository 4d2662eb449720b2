"""The self-test of a backend on a device, before the first real row goes through it.

Grouped products of a few rows: empty groups, rows behind the last segment that hold NaN, a gradient of stride 0, no
rows at all. Values are small integers, exact in every dtype. Kernels for whole experts: see `expert_check`.

Legend: R rows, e groups, A and B the widths of a GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.kernels.api import Backend
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.expert_check import first_cpu_fault, first_glue_fault, first_triton_fault
from trimtab.kernels.tensor_checks import in_clean_thread, modes

NAN = float("nan")
A, B, TAIL = 16, 32, 3
SIZES = (0, 3, 3, 0, 5, 0, 4)
TOGETHER = 8  # rows of experts that may share a block: some do, with as many rows each or not, and some do not


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The result of a self-test. `fault` is None where the kernels passed."""

    kernels: str
    device: torch.device
    dtype: torch.dtype
    fault: str | None


def self_test(kernels: Backend, device: torch.device, dtype: torch.dtype) -> SelfTest:
    """Run all checks on `device`, which has values."""

    def run() -> SelfTest:
        with torch.device("cpu"):  # the truth is taken there, whatever the caller's default is
            fault = _fault(kernels, device, dtype)
        return SelfTest(kernels=kernels.name, device=device, dtype=dtype, fault=fault)

    return in_clean_thread(device, run) if modes() else run()


def compiled_fault(kernels: CompiledKernels, dtype: torch.dtype) -> str | None:
    """The first fault of the C++ kernels, or None. Each question is asked once, whatever the number of layers."""
    # First: where products of bfloat16 are wrong it gives them up, and others make what is tested next.
    fault = kernels.fault_by(first_cpu_fault, "experts")
    return fault or kernels.fault_by(lambda ours: _first_fault(ours, torch.device("cpu"), dtype), dtype)


def _fault(kernels: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    if isinstance(kernels, CompiledKernels):
        return compiled_fault(kernels, dtype)
    fault, launch = _first_fault(kernels, device, dtype), getattr(kernels, "launch", None)
    try:
        if fault is None and hasattr(kernels, "words"):
            fault = first_glue_fault(kernels, device, dtype)
        return first_triton_fault(launch, device, dtype) if fault is None and launch is not None else fault
    except Exception as error:  # of the compiler, too
        return f"{type(error).__name__}: {error}"


class _Problem:
    """Operands of grouped products on a device, and the true results on the host in float64."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        def integers(*shape: int, step: int) -> Tensor:
            return ((torch.arange(torch.Size(shape).numel()) * step) % 5 - 2).double().view(shape)

        rows, groups, ends = sum(SIZES) + TAIL, len(sizes), torch.tensor(sizes).cumsum(0)
        x, dy, w = integers(rows, A, step=7), integers(rows, B, step=11), integers(groups, A, B, step=13)
        own_Re = torch.searchsorted(ends, torch.arange(rows), right=True)[:, None] == torch.arange(groups)
        self.truth = {"y": torch.einsum("re,ra,eab->rb", own_Re.double(), x, w)}
        for end, d in (("", dy), ("_ones", torch.ones_like(dy))):
            self.truth[f"dx{end}"] = torch.einsum("re,rb,eab->ra", own_Re.double(), d, w)
            self.truth[f"dw{end}"] = torch.einsum("re,ra,rb->eab", own_Re.double(), x, d)
        x[sum(sizes) :] = dy[sum(sizes) :] = NAN
        self.x, self.dy, self.w = (t.to(device, dtype) for t in (x, dy, w))
        self.ones = torch.ones((), device=device, dtype=dtype).expand(rows, B)
        self.offsets = torch.nn.functional.pad(ends, (1, 0)).to(device)


def _first_fault(kernels: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    checks: dict[str, tuple[str, Callable[[_Problem], Tensor]]] = {
        "output with a NaN tail": ("y", lambda p: _mm(kernels, p, p.x, p.w)),
        "input gradient with a NaN tail": ("dx", lambda p: _mm(kernels, p, p.dy, p.w.transpose(1, 2))),
        "weight gradient over stale values": ("dw", lambda p: _wgrad(kernels, p, p.dy, stale=NAN)),
        "weight gradient added to": ("dw", lambda p: _wgrad(kernels, p, p.dy, stale=1.0, add=True) - 1),
        "input gradient from a stride-0 gradient": ("dx_ones", lambda p: _mm(kernels, p, p.ones, p.w.transpose(1, 2))),
        "weight gradient from a stride-0 gradient": ("dw_ones", lambda p: _wgrad(kernels, p, p.ones, stale=NAN)),
    }
    for sizes in (SIZES, (0,) * len(SIZES)):
        problem = _Problem(device, dtype, sizes)
        for name, (truth, run) in checks.items():
            try:
                got = run(problem).double().cpu()
            except Exception as error:  # whatever a backend throws, it is the backend that is named
                return f"{name}, group sizes {sizes}: {type(error).__name__}: {error}"
            if not torch.equal(got, problem.truth[truth]):
                return f"{name}, group sizes {sizes}: wrong values"
    return None


def _mm(kernels: Backend, p: _Problem, x_RA: Tensor, w_eAB: Tensor) -> Tensor:
    """Into rows that hold NaN, and into fresh memory; the two must agree."""
    width = w_eAB.shape[2]
    _leave_nan(x_RA, width)
    given = kernels.empty_rows(x_RA.shape[0], width, x_RA.dtype, p.offsets)
    made = given.clone()
    for block in kernels.blocks(p.offsets, x_RA.shape[0], TOGETHER):
        e, r = block.experts, block.rows
        given[r] = NAN
        kernels.grouped_mm(x_RA[r], w_eAB[e], block, given[r])
        _leave_nan(x_RA[r], width)
        made[r] = kernels.grouped_mm(x_RA[r], w_eAB[e], block)
    return torch.where(given == made, given, NAN)


def _wgrad(kernels: Backend, p: _Problem, dy_RB: Tensor, *, stale: float, add: bool = False) -> Tensor:
    """Through the transposed view of a parameter's layout, which is what layers hand in."""
    dw_eBA = p.w.transpose(1, 2).contiguous().fill_(stale)
    for block in kernels.blocks(p.offsets, dy_RB.shape[0], TOGETHER):
        e, r = block.experts, block.rows
        _leave_nan(p.w[e].flatten(1), A * B)
        kernels.grouped_wgrad(p.x[r], dy_RB[r], block, dw_eBA[e].transpose(1, 2), add=add)
    return dw_eBA.transpose(1, 2)


def _leave_nan(rows: Tensor, width: int) -> None:
    """Free memory of the size that a result will take, full of NaN: an allocator hands it out again."""
    for _ in range(2):
        rows.new_full((rows.shape[0], width), NAN)
