"""A small SwiGLU expert MLP through a backend that has kernels for whole experts, against the same in float64.

Plain weights, and LoRA on weights or codes. Without autograd, so that hooks and modes of the caller see nothing of it.

Legend: M rows, K slots per row, R expert rows, E experts, D model dim, F expert hidden dim, r rank of LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.kernels.api import Block
from trimtab.kernels.compiled import CODES, TYPES, CompiledKernels

if TYPE_CHECKING:
    from trimtab.kernels.triton.language import Launch

K, E, RANK, SCALE = 2, 4, 8, 0.5
FACTORS = ("up_a", "up_b", "down_a", "down_b")
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
TILED = (20, 256, 128)
"""Widths that tiles of Triton divide."""
BLOCKS = (29, 288, 64)
"""Widths that LoRA and all formats' blocks divide; D is more values than are added up in one go."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
TRITON_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}

Quantized = Callable[[str, tuple[int, int, int], torch.dtype], tuple[Tensor, Tensor, Tensor]]
"""Codes in a format for weights of a shape and a dtype, their scales, and the weights in float32."""


class Problem:
    """Operands on the CPU, and the true y and gradients by name. Some slots are dropped.

    fields: weights, LoRA factors and scales by their names in cpu/call.h. form: of codes in place of weights, or "".
    """

    def __init__(
        self, sizes: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype, *,
        lora: bool = False, form: str = "", quantized: Quantized | None = None,
    ) -> None:  # fmt: skip
        M, D, self.hidden = sizes
        self.x, self.dy = wave(M, D, step=0.7, dtype=dtype), wave(M, D, step=1.3, dtype=dtype)
        self.w = wave(M, K, step=0.9, dtype=torch.float32)
        ids = (torch.arange(M)[:, None] + torch.arange(K)) % E
        ids = torch.where(torch.arange(M)[:, None] < 5, torch.tensor([1, 3]), ids)  # few rows before many
        self.ids = torch.where(ids == 2, E, ids)
        self.lora, self.fields, true = lora, dict[str, Any](), []
        for i, (name, outs, ins) in enumerate((("up", 2 * self.hidden, D), ("down", D, self.hidden))):
            weight = wave(E, outs, ins, step=2.1 + 1.2 * i, dtype=stored)
            self.fields[name] = weight
            if quantized is not None:
                self.fields[name], self.fields[f"{name}_scales"], weight = quantized(form, (E, outs, ins), dtype)
            true.append(weight.to(dtype).double())
            if lora:
                a = wave(E, RANK, ins, step=0.3 + 2 * i, dtype=dtype) * 0.25
                b = wave(E, outs, RANK, step=1.3 + 2 * i, dtype=dtype) * 0.25
                true[-1] += SCALE * b.double() @ a.double()
                self.fields |= {f"{name}_a": a, f"{name}_b": b, f"rank_{name}": RANK, f"scale_{name}": SCALE}
        self.fields["type_weights"] = CODES[form] if form else TYPES.get(stored)
        self.truth = swiglu_experts(self.x.double(), self.dy.double(), self.w.double(), true[0], true[1], self.ids)
        for name in ("up", "down") if lora else ():
            a, b = (SCALE * self.fields[f"{name}_{factor}"].double() for factor in "ab")
            grad = self.truth[f"d_{name}"]
            self.truth |= {f"d_{name}_a": b.mT @ grad, f"d_{name}_b": grad @ a.mT}

    def fault_in(self, got: dict[str, Tensor], bound: float) -> str | None:
        """The first result that is not true within `bound` of the largest value, or None."""
        for name, value in got.items():
            true = self.truth[name]
            if not bool(((value.double().cpu() - true).abs() <= bound * true.abs().max()).all()):
                return f"{name} is wrong"
        return None


def first_triton_fault(launch: Launch, device: torch.device, dtype: torch.dtype) -> str | None:
    """The first fault of the Triton kernels on `device`, or None. Compiles them: some seconds, once."""
    for sizes in (SMALL, TILED):
        p = Problem(sizes, dtype, dtype)
        if fault := p.fault_in(_by_triton(launch, p, device), TRITON_BOUNDS[dtype]):
            return f"fused experts {sizes} in {dtype}: {fault}"
    return None


def first_glue_fault(kernels: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """The first fault of what Triton does between grouped GEMMs, or None."""
    p = Problem(TILED, dtype, dtype)
    in_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    fault = p.fault_in(_by_glue(kernels, p, device), 5e-3 if in_tf32 else TRITON_BOUNDS[dtype])
    return None if fault is None else f"experts {TILED} in {dtype}: {fault}"


def _by_glue(kernels: Any, p: Problem, device: torch.device) -> dict[str, Tensor]:
    x, up, down, w, dy = (t.to(device) for t in (p.x, p.fields["up"], p.fields["down"], p.w, p.dy))
    plan = kernels.place_on_device(p.ids.to(device), E, 1, None)
    row_R, slot_R = plan.row_R, plan.slot_R
    block = Block(slice(0, E), slice(0, row_R.shape[0]), plan.offsets_e, tail=False)
    pre = kernels.grouped_mm(kernels.gather(x, row_R), up.mT, block)
    out = kernels.grouped_mm(kernels.activate("swiglu", pre, w, slot_R), down.mT, block)
    d_out = kernels.gather(dy, row_R)
    dh = kernels.grouped_mm(d_out, down, block)
    d_pre, hw, dw = kernels.activate_backward("swiglu", pre, dh, w, slot_R, None, True)
    d_up, d_down = torch.full_like(up, torch.nan), torch.full_like(down, torch.nan)
    kernels.grouped_wgrad(hw, d_out, block, d_down.mT)
    kernels.grouped_wgrad(kernels.gather(x, row_R), d_pre, block, d_up.mT)
    y, dx = (kernels.combine(rows, plan.row_csr) for rows in (out, kernels.grouped_mm(d_pre, up, block)))
    return {"y": y, "dx": dx, "dw": dw, "d_up": d_up, "d_down": d_down}


def _by_triton(launch: Launch, p: Problem, device: torch.device) -> dict[str, Tensor]:
    from trimtab.kernels.triton.moves import combine, place_slots
    from trimtab.kernels.triton.products import grouped_rows, weight_grad
    from trimtab.kernels.triton.swiglu import gate_up, hidden_grad

    x, up, down, w, dy = (t.to(device) for t in (p.x, p.fields["up"], p.fields["down"], p.w, p.dy))
    plan = place_slots(p.ids.to(device), E)
    row_R, offsets, (R, F) = plan.row_R, plan.offsets_e, (plan.row_R.shape[0], down.shape[2])
    weight_R = torch.where(plan.slot_R < 0, 0, w.reshape(-1)[plan.slot_R.clamp(min=0)])
    pre, h = x.new_empty(R, 2 * F), x.new_empty(R, F)
    gate_up(x, row_R, up, offsets, pre, h, launch)
    out = grouped_rows(h, down.transpose(1, 2), offsets, x.new_empty(R, x.shape[1]), launch, scale_R=weight_R)
    d_pre, hw, _ = hidden_grad(dy, row_R, down, weight_R, offsets, pre, launch)
    d_up, d_down = torch.full_like(up, torch.nan), torch.full_like(down, torch.nan)
    weight_grad(hw, dy, offsets, d_down.transpose(1, 2), launch, b_index_R=row_R)
    weight_grad(x, d_pre, offsets, d_up.transpose(1, 2), launch, a_index_R=row_R)
    dx = grouped_rows(d_pre, up, offsets, x.new_empty(R, x.shape[1]), launch)
    return {"y": combine(out, plan.row_csr), "dx": combine(dx, plan.row_csr), "d_up": d_up, "d_down": d_down}


def first_cpu_fault(kernels: CompiledKernels) -> str | None:
    """The first fault of the C++ kernels on plain weights, or None. Takes some tenths of a second."""
    with torch.no_grad():
        for dtype in BOUNDS:
            while fault := next(_faults(kernels, dtype), None):
                if dtype != torch.bfloat16 or not kernels.bf16.give_up(fault):
                    return fault
        return _places_fault(kernels)


def first_lora_fault(kernels: CompiledKernels, quantized: Quantized) -> str | None:
    """The first fault of the C++ kernels' LoRA and codes, or None. Takes some hundredths of a second."""
    with torch.no_grad():
        for dtype, form in product(BOUNDS, ("", *(form for form in CODES if form != "packed_pairs"))):
            p = Problem(BLOCKS, dtype, dtype, lora=True, form=form, quantized=quantized if form else None)
            if fault := p.fault_in(_by_cpu(kernels, p), BOUNDS[dtype]):
                return f"experts of {form or 'weights'} with adapters in {dtype}: {fault}"
    return None


def _faults(kernels: CompiledKernels, dtype: torch.dtype) -> Iterator[str]:
    own = dtype == torch.bfloat16 and kernels.bf16.number
    for sizes in (SMALL, FEW, SOME, DEEP, MANY)[: 5 if own else 3]:
        for stored in dict.fromkeys((dtype, torch.float32) if sizes in (SMALL, FEW, SOME) else (dtype,)):
            p = Problem(sizes, dtype, stored)
            for transposed in (False, True):  # and weight gradients later
                threads = 1 if sizes == MANY and not transposed else 0
                if fault := p.fault_in(_by_cpu(kernels, p, transposed, threads), BOUNDS[dtype]):
                    how = ", transposed weights, weight gradients later" * transposed
                    how += f", weights in {stored}" * (stored != dtype)
                    yield f"fused experts in {dtype}{how}: {fault}"


def _by_cpu(kernels: CompiledKernels, p: Problem, transposed: bool = False, threads: int = 0) -> dict[str, Tensor]:
    """y and gradients from C++, of factors where there is LoRA. Transposed weights get their gradients in a call of
    their own. threads: as many as torch has, if 0."""
    fields, (M, D), F = dict(p.fields), p.x.shape, p.hidden
    slot_R = p.ids.flatten().sort(stable=True).indices[: int((p.ids < E).sum())].contiguous()
    offsets = torch.nn.functional.pad(torch.bincount(p.ids.flatten(), minlength=E + 1)[:E].cumsum(0), (1, 0))
    if transposed:
        fields |= {name: fields[name].transpose(1, 2).contiguous() for name in ("up", "down")}

    def nan(*shape: int, dtype: torch.dtype = p.x.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    results = {"y": nan(M, D), "dx": nan(M, D), "dw": torch.zeros_like(p.w)}
    kept = {name: nan(len(slot_R), 2 * F) for name in ("pre", "d_pre")[: 1 + transposed]}
    if p.lora:
        kept |= {name: nan(len(slot_R), RANK) for name in ("u_up", "u_down", "v_up", "v_down")}
        results |= {f"d_{name}": nan(*fields[name].shape, dtype=torch.float32) for name in FACTORS}
    else:
        results |= {f"d_{name}": torch.full_like(fields[name], torch.nan) for name in ("up", "down")}
    fields |= {
        "type": TYPES[p.x.dtype], "type_up": fields["type_weights"], "type_down": fields["type_weights"], "act": 0,
        "transposed": int(transposed), "threads": threads or torch.get_num_threads(), "M": M, "R": len(slot_R), "E": E,
        "D": D, "F": F, "row_R": slot_R // K, "slot_R": slot_R, "offsets": offsets, "w": p.w, "x": p.x, "dy": p.dy,
        **kept, **results,
    }  # fmt: skip
    for run in (kernels.forward, kernels.backward, kernels.weight_gradients)[: 2 + transposed]:
        run(fields)
    if transposed:
        results |= {name: results[name].transpose(1, 2) for name in ("d_up", "d_down")}
    return results


def _places_fault(kernels: CompiledKernels) -> str | None:
    p = kernels.place_slots(torch.tensor([[2, 0], [-1, 2], [E, 2]]), E, 2)
    true = {
        "slot_R": [1, -1, 0, 3, 5, -1], "row_R": [0, -1, 0, 1, 2, -1], "bag_index": [2, 0, 3, 4],
        "bag_offsets": [0, 2, 3, 4], "counts_e": [1, 0, 3, 0], "offsets_e": [0, 2, 2, 6, 6],
    }  # fmt: skip
    wrong = [name for name, values in true.items() if getattr(p, name).tolist() != values]
    return f"the plan: {wrong[0]} is wrong" if wrong else None


def swiglu_experts(x: Tensor, dy: Tensor, w: Tensor, up: Tensor, down: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """y and all gradients of experts up [E, 2F, D], down [E, D, F]: every expert over all rows x, dy [M, D], weighted 0
    where a row is not its own by ids, w [M, K]."""
    y, dx, dw, d_up, d_down = (torch.zeros_like(t) for t in (x, x, w, up, down))
    for e in range(len(up)):
        own, weight = ids == e, torch.where(ids == e, w, 0).sum(1, keepdim=True)
        gate, value = (x @ up[e].t()).chunk(2, dim=1)
        slope = gate.sigmoid()
        h, dh = gate * slope * value, dy @ down[e]
        y += weight * (h @ down[e].t())
        dw += own * (h * dh).sum(1, keepdim=True)
        d_gate = weight * dh * value * slope * (1 + gate * (1 - slope))
        d_pre = torch.cat((d_gate, weight * dh * gate * slope), dim=1)
        dx += d_pre @ up[e]
        d_up[e], d_down[e] = d_pre.t() @ x, dy.t() @ (h * weight)
    return {"y": y, "dx": dx, "dw": dw, "d_up": d_up, "d_down": d_down}


def wave(*shape: int, step: float, dtype: torch.dtype) -> Tensor:
    """Values that need no random numbers and do not cancel in sums, as `dtype` holds them."""
    place = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (place * place * step).sin().view(shape).to(dtype)
