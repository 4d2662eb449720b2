"""The kernels as plain loops: what every backend is tested against, by tests and by itself. Slow on purpose.

Legend: n rows, K slots per row, A and B the widths of a GEMM, D row width, F expert hidden dim, e groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.kernels.rows import Csr


def gather_rows(x_nD: Tensor, index: Tensor) -> Tensor:
    """x[index], a row of zeros where the index is -1: [len(index), D], in float64."""
    out = torch.zeros(index.shape[0], x_nD.shape[1], dtype=torch.float64)
    for row, source in enumerate(index.tolist()):
        if source >= 0:
            out[row] = x_nD[source].double()
    return out


def combine_rows(rows_nD: Tensor, csr: Csr) -> Tensor:
    """Sum of each bag's rows: [bags, D], in float64."""
    cuts = csr.indptr.tolist()
    out = torch.zeros(len(cuts) - 1, rows_nD.shape[1], dtype=torch.float64)
    for bag, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        for row in csr.indices[start:end].tolist():
            out[bag] += rows_nD[row].double()
    return out


def grouped_mm(x_nA: Tensor, w_eAB: Tensor, offsets_e: Tensor) -> Tensor:
    """x[segment i] @ w[i], zero behind the last segment: [n, B], in float64."""
    cuts = offsets_e.tolist()
    out = torch.zeros(x_nA.shape[0], w_eAB.shape[2], dtype=torch.float64)
    for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        out[start:end] = x_nA[start:end].double() @ w_eAB[i].double()
    return out


def grouped_wgrad(a_nA: Tensor, b_nB: Tensor, offsets_e: Tensor) -> Tensor:
    """a[segment i]^T @ b[segment i]: [e, A, B], in float64."""
    cuts = offsets_e.tolist()
    parts = [a_nA[i:j].double().t() @ b_nB[i:j].double() for i, j in zip(cuts, cuts[1:], strict=False)]
    return torch.stack(parts)


def swiglu_experts(x: Tensor, dy: Tensor, w: Tensor, up: Tensor, down: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """y and all gradients of experts up [e, 2F, A], down [e, A, F]: every expert over all rows x, dy [n, A], weighted 0
    where a row is not its own by ids, w [n, K]. Without autograd, so that hooks and modes see nothing of it."""
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
    """Values that need no random numbers, as `dtype` holds them."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * step).sin().view(shape).to(dtype)
