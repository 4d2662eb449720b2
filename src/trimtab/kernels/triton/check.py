"""A small SwiGLU expert MLP through the fused kernels, forward and backward, against the same in float64.

Legend: M rows, K slots per row, e experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.kernels.reference import swiglu_experts, wave
from trimtab.kernels.rows import Csr
from trimtab.kernels.triton.gate_up import gate_up
from trimtab.kernels.triton.hidden_grad import hidden_grad
from trimtab.kernels.triton.language import Launch
from trimtab.kernels.triton.metadata import place_slots
from trimtab.kernels.triton.moves import combine
from trimtab.kernels.triton.rows_gemm import grouped_rows
from trimtab.kernels.triton.weight_grad import weight_grad

SIZES = ((9, 2, 4, 40, 24), (20, 2, 3, 256, 128))
"""(M, K, e, D, F): widths that no tile divides, and widths that tiles divide."""
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def first_fault(kernels: object, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong on `device`, None if nothing is, or if they are not ours. Compiles them: some seconds, once."""
    launch = getattr(kernels, "launch", None)
    if not isinstance(launch, Launch):
        return None
    for sizes in SIZES:
        for name, (got, true) in _results(launch, device, dtype, *sizes).items():
            error = (got.double().cpu() - true).abs().max() if true.numel() else torch.zeros(())
            if not bool(error <= BOUNDS[dtype] * true.abs().max()):
                return f"fused experts {sizes} in {dtype}: {name} is wrong"
    return None


def _results(
    launch: Launch, device: torch.device, dtype: torch.dtype, rows: int, top_k: int, experts: int, dim: int, hidden: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """What the kernels gave, and the truth, by name. The last expert but one gets no row, some slots are dropped."""
    ids = (torch.arange(rows)[:, None] + torch.arange(top_k)) % (experts + 1)
    ids = torch.where(ids == experts - 2, -1, ids)
    x, dy = wave(rows, dim, step=0.7, dtype=dtype), wave(rows, dim, step=1.3, dtype=dtype)
    up = wave(experts, 2 * hidden, dim, step=2.1, dtype=dtype)
    down = wave(experts, dim, hidden, step=3.3, dtype=dtype)
    w = wave(rows, top_k, step=0.9, dtype=torch.float32)
    true = swiglu_experts(x.double(), dy.double(), w.double(), up.double(), down.double(), ids)
    x, up, down, w, dy = (t.to(device) for t in (x, up, down, w, dy))
    p = place_slots(ids.to(device), experts)
    bags, total = Csr(indices=p.bag_index, indptr=p.bag_offsets), p.row_R.shape[0]
    weight_R = torch.where(p.slot_R < 0, 0, w.reshape(-1)[p.slot_R.clamp(min=0)])
    pre, h = x.new_empty(total, 2 * hidden), x.new_empty(total, hidden)
    gate_up(x, p.row_R, up, p.offsets_e, pre, h, launch)
    out = grouped_rows(
        h, down.transpose(1, 2), p.offsets_e, x.new_empty(total, dim), launch, scale_R=weight_R
    )  # fmt: skip
    d_pre, hw, _ = hidden_grad(dy, p.row_R, down, weight_R, p.offsets_e, pre, launch)
    d_up, d_down = torch.full_like(up, torch.nan), torch.full_like(down, torch.nan)
    weight_grad(hw, dy, p.offsets_e, d_down.transpose(1, 2), launch, b_index_R=p.row_R)
    weight_grad(x, d_pre, p.offsets_e, d_up.transpose(1, 2), launch, a_index_R=p.row_R)
    dx = grouped_rows(d_pre, up, p.offsets_e, x.new_empty(total, dim), launch)
    got = {"y": combine(out, bags), "dx": combine(dx, bags), "d_up": d_up, "d_down": d_down}
    return {name: (value, true[name]) for name, value in got.items()}
