"""A small expert MLP through the compiled kernels, forward and backward, against the same formulas in float64.

Without autograd, so that hooks and modes of the caller see nothing of it.

Legend: M rows, K slots per row, R expert rows, E experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch

from trimtab.kernels.compiled import TYPES, CompiledKernels
from trimtab.kernels.reference import swiglu_experts, wave

K, E = 2, 4
SMALL = (9, 40, 21)
"""M, D, F. No width is a multiple of a register's, and expert 2 gets no row."""
FEW = (13, 448, 32)
SOME = (97, 160, 32)
"""For weights that are read where they lie: a handful of rows and a panel that is not full, both over more values than
are added up in one go, and two panels."""
DEEP = (70, 530, 23)
MANY = (1303, 285, 9)
"""For instructions of their own: more rows than two tiles have; more values or rows than are brought at once, and on
one thread pieces of so many rows that the sums of some are done with before those of the others."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def first_fused_fault(kernels: CompiledKernels) -> str | None:
    """What is wrong with them, None if nothing is. Takes some tenths of a second."""
    with torch.no_grad():
        for dtype in BOUNDS:
            fault = _fault_in(kernels, dtype)
            while fault is not None and dtype == torch.bfloat16 and kernels.bf16.give_up(fault):
                fault = _fault_in(kernels, dtype)
            if fault is not None:
                return fault
        return _places_fault(kernels)


def _fault_in(kernels: CompiledKernels, dtype: torch.dtype) -> str | None:
    own = dtype == torch.bfloat16 and kernels.bf16.number
    for sizes in (SMALL, FEW, SOME, DEEP, MANY)[: 5 if own else 3]:
        for transposed, later in ((False, False), (True, True)):
            for stored in dict.fromkeys((dtype, torch.float32) if sizes in (SMALL, FEW, SOME) else (dtype,)):
                fault = _fault(kernels, dtype, stored, sizes, transposed, later)
                if fault is not None:
                    how = f"{', transposed weights' * transposed}{', weight gradients later' * later}"
                    how += f", weights in {stored}" * (stored != dtype)
                    return f"fused experts in {dtype}{how}: {fault}"
    return None


def _fault(
    kernels: CompiledKernels, dtype: torch.dtype, stored: torch.dtype, sizes: tuple[int, int, int], transposed: bool,
    later: bool,
) -> str | None:  # fmt: skip
    M, D, F = sizes
    x, dy = wave(M, D, step=0.7, dtype=dtype), wave(M, D, step=1.3, dtype=dtype)
    up, down = wave(E, 2 * F, D, step=2.1, dtype=stored), wave(E, D, F, step=3.3, dtype=stored)
    w = wave(M, K, step=0.9, dtype=torch.float32)
    ids = (torch.arange(M)[:, None] + torch.arange(K)) % E
    ids = torch.where(torch.arange(M)[:, None] < 5, torch.tensor([1, 3]), ids)  # few rows before many
    ids = torch.where(ids == 2, E, ids)  # dropped
    expert_R = ids.flatten().sort(stable=True)
    rows = int((ids < E).sum())
    slot_R = expert_R.indices[:rows].contiguous()
    offsets = torch.nn.functional.pad(torch.bincount(ids.flatten(), minlength=E + 1)[:E].cumsum(0), (1, 0))
    given = [t.transpose(1, 2).contiguous() if transposed else t for t in (up, down)]
    made = {name: torch.full((rows, 2 * F), torch.nan, dtype=dtype) for name in ("pre", "d_pre")[: 1 + later]}
    results = {"y": torch.full_like(x, torch.nan), "dx": torch.full_like(x, torch.nan), "dw": torch.zeros_like(w)}
    results |= {"d_up": torch.full_like(given[0], torch.nan), "d_down": torch.full_like(given[1], torch.nan)}
    fields: dict[str, Any] = {
        "type": TYPES[dtype], "type_weights": TYPES[stored], "act": 0, "folded": 1, "transposed": int(transposed),
        "type_up": TYPES[stored], "type_down": TYPES[stored],
        "M": M, "R": rows, "E": E, "D": D, "F": F,
        "threads": 1 if sizes == MANY and not later else torch.get_num_threads(),
        "row_R": slot_R // K, "slot_R": slot_R, "offsets": offsets,
        "w": w, "x": x, "up": given[0], "down": given[1], "dy": dy, **made, **results,
    }  # fmt: skip
    for run in (kernels.forward, kernels.backward, kernels.weight_gradients)[: 2 + later]:
        run(fields)
    low = up.to(dtype).double(), down.to(dtype).double()
    truth = swiglu_experts(x.double(), dy.double(), w.double(), *low, ids)
    for name, true in truth.items():
        got = results[name].double()
        if transposed and name in ("d_up", "d_down"):
            got = got.transpose(1, 2)
        if not bool(((got - true).abs() <= BOUNDS[dtype] * true.abs().max()).all()):
            return f"{name} is wrong"
    return None


def _places_fault(kernels: CompiledKernels) -> str | None:
    p = kernels.place_slots(torch.tensor([[2, 0], [-1, 2], [E, 2]]), E, 2)
    true = {
        "slot_R": [1, -1, 0, 3, 5, -1], "row_R": [0, -1, 0, 1, 2, -1], "bag_index": [2, 0, 3, 4],
        "bag_offsets": [0, 2, 3, 4], "counts_e": [1, 0, 3, 0], "offsets_e": [0, 2, 2, 6, 6],
    }  # fmt: skip
    wrong = [name for name, values in true.items() if getattr(p, name).tolist() != values]
    return f"the plan: {wrong[0]} is wrong" if wrong else None
