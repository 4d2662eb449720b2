"""Expert rows times one weight, in the form that MKL computes fastest, a row's bits its own.

For float32 on Intel's processors with AVX-512; on others MKL takes other kernels. x w is left as it is, but for these:

    in steps        of a deep weight, A > 768, MKL adds few rows in another order than many. In steps over A the order
                    is the same however many rows and threads there are. Steps are short where the weight's rows are a
                    multiple of 4096 bytes apart: all lines of one of its columns belong in one set of the cache, and a
                    step takes no more of them than there is room for (0.7 to 0.9 of the time up to 128 rows on one
                    thread, but 1.04 to 1.1 with more of either)
    turned          w^T x^T, turned back, of few rows and a weight whose columns lie in memory as rows: on one thread
                    0.7 to 0.95 of the time
    side by side    of the same on several threads, each with its part of B: MKL leaves so few rows to one of them
                    (0.6 to 0.95 of the time on two)

A weight's gradient, x^T dy, takes MKL twice as long over 48 rows as over 47; up to 200 `trimtab.kernels.compiled`
needs less (`slow_gradient`).

A row's bits are those that it has among any number of rows from 2 on, or from 16 on where the weight's columns lie in
memory as rows; and with any number of threads that leaves each 128 of B, but for such a weight with A = 1 modulo 384,
A > 768. Within a step MKL takes one fused multiply-add after the other, as the compiled kernels do: with their steps,
and with fewer than 16 rows filled up with zeros, the bits are the same. `CompiledKernels.sums_as_mkl` looks whether
they are on this machine.

Legend: R rows, P rows filled up to whole registers, A and B the widths of the GEMM, p parts, b = B / p.
"""

from __future__ import annotations

import math
import platform
from functools import lru_cache

import torch
from torch import Tensor

from trimtab.kernels import processor
from trimtab.kernels.pages import Pages

TURNED, BESIDE = 80, 63
"""Rows up to which the two forms are the faster: with more, MKL brings the weight into order itself."""
LARGE = 1 << 20
"""Values of a weight from which turning rows is the less work."""
SHORT, LONG, PAGE, REGISTER = 128, 512, 4096, 16
DEPTH = 384
"""Values of A that MKL adds up before it adds the sums, if there are more than twice as many: with columns that lie as
rows always on one thread, and then steps of as many have its bits. Only a last step of one value it takes in another
order."""
NARROW, WIDE = 128, 256
"""Columns of a thread up to which MKL may take other steps than DEPTH of a product of more, and those from which it is
left to take them."""

SLOW, SLOW_ADDED = range(48, 200), range(48, 112)
"""Rows over which a weight's gradient takes the longer by MKL: written, or added to what is there."""


def slow_gradient(rows: int, *, add: bool) -> bool:
    """Whether others compute a weight's gradient over so many rows faster than MKL, in float32."""
    return _measured() and rows in (SLOW_ADDED if add else SLOW)


def same_bits(*widths: int) -> bool:
    """Whether products of such A and B, if `as_compiled`, have the bits of the compiled kernels."""
    exact = torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
    wide = min(widths) >= NARROW * torch.get_num_threads()
    return _measured() and exact and wide and all(width % DEPTH != 1 for width in widths)


def rows_mm(x_RA: Tensor, w_AB: Tensor, out_RB: Tensor, pages: Pages, *, as_compiled: bool = False) -> Tensor:
    """x w into `out`, for operands of one dtype on the CPU.

    as_compiled: with the bits of the compiled kernels, where they are the `same_bits`.
    """
    if x_RA.dtype != torch.float32 or not _measured():
        return torch.mm(x_RA, w_AB, out=out_RB)
    rows, depth, threads = *x_RA.shape, torch.get_num_threads()
    deep = depth > 2 * DEPTH
    along_A, along_B = w_AB.stride()
    if as_compiled:
        if 0 < rows < REGISTER:
            return _filled_up(x_RA, w_AB, out_RB, pages)
        if along_B == 1 or not deep:
            return _in_steps(x_RA, w_AB, out_RB, DEPTH)
    if along_B == 1:
        apart = along_A * 4 % PAGE == 0
        return _in_steps(x_RA, w_AB, out_RB, (SHORT if apart else LONG) if deep else depth)
    as_mkl = not (deep and depth % DEPTH == 1)
    parts = math.gcd(w_AB.shape[1], threads)
    wide = not deep or w_AB.shape[1] // parts >= WIDE
    if threads == 1 and wide:
        if rows <= TURNED and w_AB.numel() >= LARGE and along_A == 1 and as_mkl:
            return _turned(x_RA, w_AB, out_RB, DEPTH if deep else depth, pages)
        return torch.mm(x_RA, w_AB, out=out_RB)
    if REGISTER <= rows <= BESIDE and parts > 1 and along_A == 1 and as_mkl and wide:
        return _side_by_side(x_RA, w_AB, out_RB, parts, pages)
    return _in_steps(x_RA, w_AB, out_RB, DEPTH if deep else depth)


def slower_than_compiled() -> bool:
    """Whether the compiled kernels are faster than MKL whatever the number of rows.

    Measured on Zen 4 at 1024 x 2816, in the time that blocks take with MKL: of 64 rows 0.64 forward and 0.77 forward
    and backward on one thread, 0.52 and 0.45 on two; of 512 rows 0.80 and 0.91, 0.78 and 0.83. Compiled for AVX2, as
    on Zen 2 and 3, forward and backward on one thread 0.88 and 0.93 of the time of kernels "loop".
    """
    return _vendor() == "AuthenticAMD"


def _measured() -> bool:
    """Whether the forms are faster here and have the bits that are told of: MKL's kernels for AVX-512."""
    intel = _vendor() == "GenuineIntel"  # by which MKL chooses, whatever instructions there are
    return intel and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch._C.has_mkl


@lru_cache(1)
def _vendor() -> str:
    """As the processor names it; "" where it is neither of those that are told apart."""
    named = processor.told().get("vendor_id") or platform.processor()
    return next((vendor for vendor in ("GenuineIntel", "AuthenticAMD") if vendor in named), "")


def _in_steps(x_RA: Tensor, w_AB: Tensor, out_RB: Tensor, step: int) -> Tensor:
    if step >= x_RA.shape[1]:
        return torch.mm(x_RA, w_AB, out=out_RB)
    for i, (x, w) in enumerate(zip(torch.split(x_RA, step, 1), torch.split(w_AB, step), strict=True)):
        torch.addmm(out_RB, x, w, beta=int(i > 0), out=out_RB)  # beta 0 ignores what was there, even NaN
    return out_RB


def _filled_up(x_RA: Tensor, w_AB: Tensor, out_RB: Tensor, pages: Pages) -> Tensor:
    rows = x_RA.shape[0]
    x_PA = pages.empty(REGISTER, x_RA.shape[1], dtype=x_RA.dtype)
    x_PA[:rows], x_PA[rows:] = x_RA, 0
    out_PB = pages.empty(REGISTER, w_AB.shape[1], dtype=x_RA.dtype)
    return out_RB.copy_(rows_mm(x_PA, w_AB, out_PB, pages, as_compiled=True)[:rows])


def _turned(x_RA: Tensor, w_AB: Tensor, out_RB: Tensor, step: int, pages: Pages) -> Tensor:
    rows = x_RA.shape[0]
    filled = -(-rows // REGISTER) * REGISTER
    x_AP = pages.empty(x_RA.shape[1], filled, dtype=x_RA.dtype)
    x_AP[:, :rows] = x_RA.t()
    x_AP[:, rows:] = 0
    out_BP = pages.empty(w_AB.shape[1], filled, dtype=x_RA.dtype)
    _in_steps(w_AB.t(), x_AP, out_BP, step)
    return out_RB.copy_(out_BP[:, :rows].t())


def _side_by_side(x_RA: Tensor, w_AB: Tensor, out_RB: Tensor, parts: int, pages: Pages) -> Tensor:
    (rows, depth), wide = x_RA.shape, w_AB.shape[1] // parts
    w_pAb = w_AB.t().view(parts, wide, depth).transpose(1, 2)
    out_pRb = pages.empty(parts, rows, wide, dtype=x_RA.dtype)
    torch.bmm(x_RA.expand(parts, rows, depth), w_pAb, out=out_pRb)
    out_RB.view(rows, parts, wide).copy_(out_pRb.transpose(0, 1))
    return out_RB
