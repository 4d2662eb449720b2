"""A GEMM of few float32 rows and one weight, in the form that MKL computes fastest.

Two forms are slow there, as measured on AVX-512 with 20 to 128 rows and weights that are read from memory:

    the weight is turned           w^T x^T, turned back, takes 0.7 to 0.95 of the time of x w, on one thread
    the weight's rows are a        in steps over A: 0.65 to 0.9 of the time. All lines of a column of such a weight
    multiple of 4096 bytes apart   belong in one set of the cache; a step takes no more of them than there is room for

Legend: R rows, P rows filled up to whole registers, A and B the widths of the GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.kernels.pages import Pages

TURNED, APART = 80, 191
"""Rows up to which the two forms are slow: with more, MKL brings the weight into order itself."""
LARGE = 1 << 20
"""Values of a weight from which turning rows is the less work."""
STEP, PAGE, REGISTER = 128, 4096, 16
DEPTH = 384
"""Values of A that MKL adds up before it adds the sums, if there are more than twice as many: then the turned form in
such steps has the bits of x w, whatever the number of rows. A last step of one value it takes in another order. Of few
rows of a weight that is not turned it takes others than of many, in any form."""


def few_rows_mm(x_RA: Tensor, w_AB: Tensor, out_RB: Tensor, pages: Pages) -> Tensor:
    """x w into `out`, for operands of one dtype on the CPU."""
    rows, deep = x_RA.shape[0], x_RA.shape[1] > 2 * DEPTH
    if rows <= APART and x_RA.dtype == torch.float32 and _measured():
        along_A, along_B = w_AB.stride()
        if deep and along_B == 1 and along_A * 4 % PAGE == 0:
            return _in_steps(x_RA, w_AB, out_RB)
        turned = along_A == 1 != along_B and w_AB.numel() >= LARGE and not (deep and x_RA.shape[1] % DEPTH == 1)
        if turned and rows <= TURNED and torch.get_num_threads() == 1:
            return _turned(x_RA, w_AB, out_RB, pages)
    return torch.mm(x_RA, w_AB, out=out_RB)


def _measured() -> bool:
    """Whether the forms are slow here and have the bits that are told of: MKL with AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch._C.has_mkl


def _turned(x_RA: Tensor, w_AB: Tensor, out_RB: Tensor, pages: Pages) -> Tensor:
    rows = x_RA.shape[0]
    filled = -(-rows // REGISTER) * REGISTER
    x_AP = pages.empty(x_RA.shape[1], filled, dtype=x_RA.dtype)
    x_AP[:, :rows] = x_RA.t()
    x_AP[:, rows:] = 0
    out_BP = pages.empty(w_AB.shape[1], filled, dtype=x_RA.dtype)
    step = DEPTH if x_RA.shape[1] > 2 * DEPTH else x_RA.shape[1]
    for i, (w, x) in enumerate(zip(torch.split(w_AB.t(), step, 1), torch.split(x_AP, step), strict=True)):
        torch.addmm(out_BP, w, x, beta=int(i > 0), out=out_BP)
    return out_RB.copy_(out_BP[:, :rows].t())


def _in_steps(x_RA: Tensor, w_AB: Tensor, out_RB: Tensor) -> Tensor:
    for i, (x, w) in enumerate(zip(torch.split(x_RA, STEP, 1), torch.split(w_AB, STEP), strict=True)):
        torch.addmm(out_RB, x, w, beta=int(i > 0), out=out_RB)  # beta 0 ignores what was there, even NaN
    return out_RB
